"""Places an order and publishes a message about it, in one transaction. MariaDB and MySQL, with PyMySQL."""

import json
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pymysql
from pymysql.constants import ER

if len(sys.argv) < 6:
    sys.exit("usage: python mariadb.py URL DESTINATION KEY CONTENT_TYPE FILE [declined | once DEDUP_KEY]")
url, destination, customer, content_type, file, *how = sys.argv[1:]
payload = Path(file).read_bytes()


def place_order(cursor):
    cursor.execute("INSERT INTO orders (customer) VALUES (%s)", [customer])
    cursor.execute(
        "INSERT INTO posthouse_message (destination, type, message_key, content_type, headers, payload)"
        " VALUES (%s, %s, %s, %s, %s, %s)",
        [destination, "order.placed.v1", customer, content_type, json.dumps({"shop": "北京"}), payload],
    )


def place_order_once(cursor, dedup_key):
    """Publishes only if this dedup key was never used. The order is placed in any case."""
    cursor.execute("INSERT INTO orders (customer) VALUES (%s)", [customer])
    try:
        cursor.execute("INSERT INTO posthouse_dedup (dedup_key, message_id) VALUES (%s, %s)", [dedup_key, dedup_key])
    except pymysql.err.IntegrityError as e:
        if e.args[0] == ER.DUP_ENTRY:
            return False
        raise
    cursor.execute(
        "INSERT INTO posthouse_message (message_id, destination, type, message_key, content_type, payload)"
        " VALUES (%s, %s, %s, %s, %s, %s)",
        [dedup_key, destination, "order.placed.v1", customer, content_type, payload],
    )
    return True


server = urlsplit(url)
conn = pymysql.connect(
    host=server.hostname, port=server.port or 3306, user=server.username, password=unquote(server.password or ""),
    database=server.path[1:], charset="utf8mb4",
)  # fmt: skip
with conn, conn.cursor() as cursor:  # closing it without a commit rolls back
    if how[:1] == ["once"]:
        said = "published" if place_order_once(cursor, how[1]) else "published before"
    else:
        place_order(cursor)
        if how == ["declined"]:
            sys.exit("the payment was declined: neither the order nor the message stays")
        said = "published"
    conn.commit()
    print(said)
