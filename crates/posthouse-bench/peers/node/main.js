// A peer behind the bench's protocol: one command a line on stdin, one JSON object a line on stdout. The other drivers
// (../go, ../java, and ../../src/peers for Rust) do the same:
//
//   prepare          make the tables: the business's, and the peer's own by its own migration
//   business N C     N transactions of one business row, on C connections       -> seconds
//   publish N C      N transactions of one business row and one message         -> seconds, first
//   load N RATE C    the same, each at its time, whoever is late catches up      -> first, committed (microseconds, by number)
//   run              start sending
//   confirmed        how many messages the broker has confirmed                  -> confirmed
//   pending          what isn't finished by the tables                           -> pending
//   stop             stop sending
//   quit
//
// A message's body is its number, the time at which its publish should have begun, and padding.

import { createInterface } from "node:readline";
import { once } from "node:events";
import amqp from "amqplib";
import pg from "pg";

import packages from "./package.json" with { type: "json" };

// stdout is the protocol's.
const answerWith = (object) => process.stdout.write(`${JSON.stringify(object)}\n`);
console.log = console.info = console.error;

const [, , name, json] = process.argv;
const config = JSON.parse(json);
const { open } = await import(`./${name}.js`);

// Numbers in a bigint column are numbers here.
pg.types.setTypeParser(20, Number);

let confirmed = 0;

// One connection and one channel in confirm mode; a publish is done when the broker has confirmed it.
const connection = await amqp.connect(config.amqp);
const channel = await connection.createConfirmChannel();

// Resolves when the broker has confirmed. `publish` answers false while the socket's buffer is full: wait for it to drain.
let drained = null;
async function send(body) {
  while (drained) await drained;
  await new Promise((resolve, reject) => {
    const options = { persistent: true, mandatory: true, messageId: crypto.randomUUID(), contentType: "text/plain" };
    const room = channel.publish("", config.queue, Buffer.from(body), options, (error) => (error ? reject(error) : resolve()));
    if (!room && !drained) drained = once(channel, "drain").then(() => (drained = null));
  });
  confirmed += 1;
}

const pool = new pg.Pool({ connectionString: config.database, max: config.connections });
const peer = await open({ config, pool, send });

// The system's clock, by which arrivals are told, in microseconds. `performance.timeOrigin` is that of the process's start, and
// the system's clock may have been set since.
let origin = 0;
function setOrigin() {
  const before = Date.now();
  let now = before;
  while (now === before) now = Date.now();
  origin = now - performance.now();
}
const micros = () => Math.round((origin + performance.now()) * 1000);
setOrigin();
const padding = "x".repeat(config.payload);
let numbers = 0;
let orders = 0;

async function transaction(number, intended) {
  const client = await pool.connect();
  try {
    await client.query("BEGIN");
    await client.query({ name: "order", text: "INSERT INTO bench_orders (id, customer) VALUES ($1, $2)", values: [orders++, "customer"] });
    if (number !== null) {
      const head = `${String(number).padStart(10, "0")} ${String(intended).padStart(16, "0")} `;
      await peer.publish(client, (head + padding).slice(0, config.payload));
    }
    await client.query("COMMIT");
  } finally {
    client.release();
  }
}

async function many(n, c, publish) {
  const first = numbers;
  const last = publish ? (numbers += n) : numbers + n;
  let next = first;
  const started = performance.now();
  await Promise.all(
    Array.from({ length: c }, async () => {
      while (next < last) {
        const number = next++;
        await transaction(publish ? number : null, micros());
      }
    }),
  );
  return { seconds: (performance.now() - started) / 1000, first };
}

async function load(n, rate, c) {
  const first = numbers;
  numbers += n;
  const committed = new Array(n);
  setOrigin();
  const start = micros() + 1000;
  let next = 0;
  await Promise.all(
    Array.from({ length: c }, async () => {
      while (next < n) {
        const i = next++;
        const intended = start + Math.round((i / rate) * 1e6);
        const early = intended - micros();
        if (early > 0) await new Promise((resolve) => setTimeout(resolve, Math.ceil(early / 1000)));
        await transaction(first + i, intended);
        committed[i] = micros();
      }
    }),
  );
  return { first, committed };
}

const commands = {
  async prepare() {
    await pool.query("CREATE TABLE bench_orders (id bigint PRIMARY KEY, customer text NOT NULL)");
    await peer.prepare();
    return { version: packages.dependencies[name] };
  },
  business: (n, c) => many(n, c, false),
  publish: (n, c) => many(n, c, true),
  load,
  run: () => peer.run(),
  confirmed: () => ({ confirmed }),
  pending: async () => ({ pending: await peer.pending() }),
  stop: () => peer.stop(),
};

for await (const line of createInterface({ input: process.stdin })) {
  const [what, ...numbers] = line.split(" ");
  if (what === "quit") break;
  try {
    const answer = await commands[what](...numbers.map(Number));
    answerWith({ done: what, ...answer });
  } catch (error) {
    answerWith({ error: `${what}: ${error.stack ?? error}` });
  }
}
await connection.close();
await pool.end();
process.exit(0);
