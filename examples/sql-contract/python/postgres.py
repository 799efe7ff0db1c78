"""Places an order and publishes a message about it, in one transaction. PostgreSQL, with psycopg 3."""

import json
import sys
from pathlib import Path

import psycopg

if len(sys.argv) < 6:
    sys.exit("usage: python postgres.py URL DESTINATION KEY CONTENT_TYPE FILE [declined | once DEDUP_KEY]")
url, destination, customer, content_type, file, *how = sys.argv[1:]
payload = Path(file).read_bytes()


def place_order(conn):
    conn.execute("INSERT INTO orders (customer) VALUES (%s)", [customer])
    conn.execute(
        "INSERT INTO posthouse_message (destination, type, message_key, content_type, headers, payload)"
        " VALUES (%s, %s, %s, %s, %s, %s)",
        [destination, "order.placed.v1", customer, content_type, json.dumps({"shop": "北京"}), payload],
    )


def place_order_once(conn, dedup_key):
    """Publishes only if this dedup key was never used. The order is placed in any case."""
    conn.execute("INSERT INTO orders (customer) VALUES (%s)", [customer])
    published = conn.execute(
        "WITH fresh AS (INSERT INTO posthouse_dedup (dedup_key, message_id) VALUES (%s, %s)"
        "               ON CONFLICT DO NOTHING RETURNING message_id)"
        " INSERT INTO posthouse_message (message_id, destination, type, message_key, content_type, payload)"
        " SELECT message_id, %s, %s, %s, %s, %s FROM fresh",
        [dedup_key, dedup_key, destination, "order.placed.v1", customer, content_type, payload],
    )
    return published.rowcount == 1


with psycopg.connect(url) as conn:  # commits at the end, rolls back when something is raised
    if how[:1] == ["once"]:
        print("published" if place_order_once(conn, how[1]) else "published before")
    else:
        place_order(conn)
        if how == ["declined"]:
            sys.exit("the payment was declined: neither the order nor the message stays")
        print("published")
