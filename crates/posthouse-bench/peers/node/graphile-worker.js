// graphile-worker at the settings of its page on performance (https://worker.graphile.org/docs/performance), which gives
// them for its own figures.

import { Logger, run, runMigrations } from "graphile-worker";

// It writes a line for each job otherwise.
const logger = new Logger(() => (level, message) => level !== "info" && level !== "debug" && console.error(message));

export async function open({ config, pool, send }) {
  let runner;
  const preset = {
    worker: {
      connectionString: config.database,
      concurrentJobs: 24,
      maxPoolSize: 25,
      // Jobs are fetched 500 at a time and finished in batches, as soon as there is one. LISTEN/NOTIFY is always on;
      // pollInterval (2 s) is its fallback and for delayed jobs only.
      localQueue: { size: 500 },
      completeJobBatchDelay: 0,
      failJobBatchDelay: 0,
      logger,
    },
  };
  return {
    prepare: () => runMigrations({ preset }),
    // The documented way of adding a job within the caller's own transaction.
    publish: (client, body) =>
      client.query({ name: "job", text: "SELECT graphile_worker.add_job('send', $1)", values: [JSON.stringify({ body })] }),
    async run() {
      runner = await run({ preset, taskList: { send: (payload) => send(payload.body) }, parsedCronItems: [], noHandleSignals: true });
    },
    async pending() {
      const { rows } = await pool.query("SELECT count(*) AS n FROM graphile_worker.jobs");
      return rows[0].n;
    },
    stop: () => runner.stop(),
  };
}
