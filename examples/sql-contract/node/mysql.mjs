// Places an order and publishes a message about it, in one transaction. MariaDB and MySQL, with mysql2.
import { readFile } from "node:fs/promises";
import mysql from "mysql2/promise";

if (process.argv.length < 7) {
  console.error("usage: node mysql.mjs URL DESTINATION KEY CONTENT_TYPE FILE [declined | once DEDUP_KEY]");
  process.exit(2);
}
const [url, destination, customer, contentType, file, how, dedupKey] = process.argv.slice(2);
const payload = await readFile(file);

async function placeOrder(db) {
  await db.execute("INSERT INTO orders (customer) VALUES (?)", [customer]);
  await db.execute(
    `INSERT INTO posthouse_message (destination, type, message_key, content_type, headers, payload)
     VALUES (?, ?, ?, ?, ?, ?)`,
    [destination, "order.placed.v1", customer, contentType, JSON.stringify({ shop: "北京" }), payload],
  );
}

// Publishes only if this dedup key was never used. The order is placed in any case.
async function placeOrderOnce(db) {
  await db.execute("INSERT INTO orders (customer) VALUES (?)", [customer]);
  try {
    await db.execute("INSERT INTO posthouse_dedup (dedup_key, message_id) VALUES (?, ?)", [dedupKey, dedupKey]);
  } catch (error) {
    if (error.code === "ER_DUP_ENTRY") return false;
    throw error;
  }
  await db.execute(
    `INSERT INTO posthouse_message (message_id, destination, type, message_key, content_type, payload)
     VALUES (?, ?, ?, ?, ?, ?)`,
    [dedupKey, destination, "order.placed.v1", customer, contentType, payload],
  );
  return true;
}

const db = await mysql.createConnection(url);
try {
  await db.beginTransaction();
  let fresh = true;
  if (how === "once") fresh = await placeOrderOnce(db);
  else await placeOrder(db);
  if (how === "declined") throw new Error("the payment was declined: neither the order nor the message stays");
  await db.commit();
  console.log(fresh ? "published" : "published before");
} catch (error) {
  await db.rollback();
  throw error;
} finally {
  await db.end();
}
