// Places an order and publishes a message about it, in one transaction. PostgreSQL, with pg.
import { readFile } from "node:fs/promises";
import pg from "pg";

if (process.argv.length < 7) {
  console.error("usage: node postgres.mjs URL DESTINATION KEY CONTENT_TYPE FILE [declined | once DEDUP_KEY]");
  process.exit(2);
}
const [url, destination, customer, contentType, file, how, dedupKey] = process.argv.slice(2);
const payload = await readFile(file);

async function placeOrder(client) {
  await client.query("INSERT INTO orders (customer) VALUES ($1)", [customer]);
  await client.query(
    `INSERT INTO posthouse_message (destination, type, message_key, content_type, headers, payload)
     VALUES ($1, $2, $3, $4, $5, $6)`,
    [destination, "order.placed.v1", customer, contentType, { shop: "北京" }, payload],
  );
}

// Publishes only if this dedup key was never used. The order is placed in any case.
async function placeOrderOnce(client) {
  await client.query("INSERT INTO orders (customer) VALUES ($1)", [customer]);
  const published = await client.query(
    `WITH fresh AS (INSERT INTO posthouse_dedup (dedup_key, message_id) VALUES ($1, $1)
                    ON CONFLICT DO NOTHING RETURNING message_id)
     INSERT INTO posthouse_message (message_id, destination, type, message_key, content_type, payload)
     SELECT message_id, $2, $3, $4, $5, $6 FROM fresh`,
    [dedupKey, destination, "order.placed.v1", customer, contentType, payload],
  );
  return published.rowCount === 1;
}

const client = new pg.Client({ connectionString: url });
await client.connect();
try {
  await client.query("BEGIN");
  let fresh = true;
  if (how === "once") fresh = await placeOrderOnce(client);
  else await placeOrder(client);
  if (how === "declined") throw new Error("the payment was declined: neither the order nor the message stays");
  await client.query("COMMIT");
  console.log(fresh ? "published" : "published before");
} catch (error) {
  await client.query("ROLLBACK");
  throw error;
} finally {
  await client.end();
}
