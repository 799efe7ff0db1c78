// pg-boss at the settings that its documentation names for throughput and for short waiting times.

import { PgBoss } from "pg-boss";

const QUEUE = "send";

export async function open({ config, pool, send }) {
  const boss = new PgBoss({
    connectionString: config.database,
    max: 10,
    // Workers are woken by NOTIFY, where the queue says so.
    useListenNotify: true,
  });
  boss.on("error", (error) => console.error(error));
  return {
    async prepare() {
      await boss.start();
      await boss.createQueue(QUEUE, { notify: true });
    },
    // `db` is the documented way of sending within the caller's own transaction.
    publish: (client, body) => boss.send(QUEUE, { body }, { db: { executeSql: (text, values) => client.query(text, values) } }),
    async run() {
      const options = {
        // A fetch and a completion cost one statement each, whatever the size; the default is 1.
        batchSize: 500,
        // Fetches go on without a pause while batches come back full.
        burstWhenBatchFull: true,
        // One fetches while the other waits for confirms.
        localConcurrency: 2,
        // The shortest that is allowed; only while NOTIFY is down.
        pollingIntervalSeconds: 0.5,
        // The shortest that is allowed, instead of 30 s: what a notification misses waits this long at most.
        notifyPollingIntervalSeconds: 0.5,
      };
      await boss.work(QUEUE, options, async (jobs) => {
        await Promise.all(jobs.map((job) => send(job.data.body)));
      });
    },
    async pending() {
      const { rows } = await pool.query("SELECT count(*) AS n FROM pgboss.job WHERE name = $1 AND state < 'completed'", [QUEUE]);
      return rows[0].n;
    },
    stop: () => boss.offWork(QUEUE, { wait: true }),
  };
}
