// Places an order and publishes a message about it, in one transaction. PostgreSQL, with pgx.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/jackc/pgx/v5"
)

type order struct {
	destination, customer, contentType string
	payload                            []byte
}

func placeOrder(ctx context.Context, tx pgx.Tx, o order) error {
	if _, err := tx.Exec(ctx, `INSERT INTO orders (customer) VALUES ($1)`, o.customer); err != nil {
		return err
	}
	_, err := tx.Exec(ctx,
		`INSERT INTO posthouse_message (destination, type, message_key, content_type, headers, payload)
		 VALUES ($1, $2, $3, $4, $5, $6)`,
		o.destination, "order.placed.v1", o.customer, o.contentType, map[string]string{"shop": "北京"}, o.payload)
	return err
}

// Publishes only if this dedup key was never used. The order is placed in any case.
func placeOrderOnce(ctx context.Context, tx pgx.Tx, o order, dedupKey string) (bool, error) {
	if _, err := tx.Exec(ctx, `INSERT INTO orders (customer) VALUES ($1)`, o.customer); err != nil {
		return false, err
	}
	published, err := tx.Exec(ctx,
		`WITH fresh AS (INSERT INTO posthouse_dedup (dedup_key, message_id) VALUES ($1, $1)
		                ON CONFLICT DO NOTHING RETURNING message_id)
		 INSERT INTO posthouse_message (message_id, destination, type, message_key, content_type, payload)
		 SELECT message_id, $2, $3, $4, $5, $6 FROM fresh`,
		dedupKey, o.destination, "order.placed.v1", o.customer, o.contentType, o.payload)
	return published.RowsAffected() == 1, err
}

func run(args []string) error {
	if len(args) < 5 {
		return errors.New("usage: postgres URL DESTINATION KEY CONTENT_TYPE FILE [declined | once DEDUP_KEY]")
	}
	payload, err := os.ReadFile(args[4])
	if err != nil {
		return err
	}
	o := order{args[1], args[2], args[3], payload}
	how := append(args[5:], "", "")

	ctx := context.Background()
	conn, err := pgx.Connect(ctx, args[0])
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	fresh := true
	// Commits if the function returns nil, else rolls back.
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if how[0] == "once" {
			fresh, err = placeOrderOnce(ctx, tx, o, how[1])
			return err
		}
		if err := placeOrder(ctx, tx, o); err != nil {
			return err
		}
		if how[0] == "declined" {
			return errors.New("the payment was declined: neither the order nor the message stays")
		}
		return nil
	})
	if err != nil {
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
