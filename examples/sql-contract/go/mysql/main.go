// Places an order and publishes a message about it, in one transaction. MariaDB and MySQL, with Go-MySQL-Driver.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/go-sql-driver/mysql"
)

const duplicateEntry = 1062

type order struct {
	destination, customer, contentType string
	payload                            []byte
}

func placeOrder(ctx context.Context, tx *sql.Tx, o order) error {
	if _, err := tx.ExecContext(ctx, `INSERT INTO orders (customer) VALUES (?)`, o.customer); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx,
		`INSERT INTO posthouse_message (destination, type, message_key, content_type, headers, payload)
		 VALUES (?, ?, ?, ?, ?, ?)`,
		o.destination, "order.placed.v1", o.customer, o.contentType, `{"shop": "北京"}`, o.payload)
	return err
}

// Publishes only if this dedup key was never used. The order is placed in any case.
func placeOrderOnce(ctx context.Context, tx *sql.Tx, o order, dedupKey string) (bool, error) {
	if _, err := tx.ExecContext(ctx, `INSERT INTO orders (customer) VALUES (?)`, o.customer); err != nil {
		return false, err
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO posthouse_dedup (dedup_key, message_id) VALUES (?, ?)`, dedupKey, dedupKey)
	if refused := (*mysql.MySQLError)(nil); errors.As(err, &refused) && refused.Number == duplicateEntry {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	_, err = tx.ExecContext(ctx,
		`INSERT INTO posthouse_message (message_id, destination, type, message_key, content_type, payload)
		 VALUES (?, ?, ?, ?, ?, ?)`,
		dedupKey, o.destination, "order.placed.v1", o.customer, o.contentType, o.payload)
	return true, err
}

func run(args []string) error {
	if len(args) < 5 {
		return errors.New("usage: mysql DSN DESTINATION KEY CONTENT_TYPE FILE [declined | once DEDUP_KEY]")
	}
	payload, err := os.ReadFile(args[4])
	if err != nil {
		return err
	}
	o := order{args[1], args[2], args[3], payload}
	how := append(args[5:], "", "")

	ctx := context.Background()
	db, err := sql.Open("mysql", args[0])
	if err != nil {
		return err
	}
	defer db.Close()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // does nothing after the commit
	fresh := true
	if how[0] == "once" {
		fresh, err = placeOrderOnce(ctx, tx, o, how[1])
	} else {
		err = placeOrder(ctx, tx, o)
	}
	if err == nil && how[0] == "declined" {
		err = errors.New("the payment was declined: neither the order nor the message stays")
	}
	if err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	if fresh {
		fmt.Println("published")
	} else {
		fmt.Println("published before")
	}
	return nil
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}
