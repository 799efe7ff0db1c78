// River behind the bench's protocol, which ../node/main.js describes.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
)

type config struct {
	Database    string `json:"database"`
	AMQP        string `json:"amqp"`
	Queue       string `json:"queue"`
	Payload     int    `json:"payload"`
	Connections int    `json:"connections"`
}

type driver struct {
	config    config
	pool      *pgxpool.Pool
	channel   *amqp.Channel
	confirmed atomic.Int64
	river     *peer
	numbers   int
	orders    atomic.Int64
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Returns when the broker has confirmed. A channel may be used by many goroutines at a time.
func (d *driver) send(ctx context.Context, id, body string) error {
	message := amqp.Publishing{DeliveryMode: amqp.Persistent, MessageId: id, ContentType: "text/plain", Body: []byte(body)}
	confirmation, err := d.channel.PublishWithDeferredConfirmWithContext(ctx, "", d.config.Queue, true, false, message)
	if err != nil {
		return err
	}
	confirmed, err := confirmation.WaitContext(ctx)
	if err != nil {
		return err
	}
	if !confirmed {
		return fmt.Errorf("the broker refused %s", id)
	}
	d.confirmed.Add(1)
	return nil
}

// A transaction of one business row, with a message if there is a body.
func (d *driver) transaction(ctx context.Context, body string) error {
	return pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
		const insert = "INSERT INTO bench_orders (id, customer) VALUES ($1, $2)"
		if _, err := tx.Exec(ctx, insert, d.orders.Add(1), "customer"); err != nil {
			return err
		}
		if body == "" {
			return nil
		}
		return d.river.publish(ctx, tx, body)
	})
}

func (d *driver) body(number int, intended time.Time) string {
	head := fmt.Sprintf("%010d %016d ", number, intended.UnixMicro())
	return (head + strings.Repeat("x", d.config.Payload))[:d.config.Payload]
}

// Does n things, c at a time, numbered from 0.
func spread(n, c int, do func(i int)) {
	var next atomic.Int64
	var group sync.WaitGroup
	for range c {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				do(i)
			}
		})
	}
	group.Wait()
}

func (d *driver) many(ctx context.Context, n, c int, publish bool) map[string]any {
	first := d.numbers
	if publish {
		d.numbers += n
	}
	started := time.Now()
	spread(n, c, func(i int) {
		body := ""
		if publish {
			body = d.body(first+i, time.Now())
		}
		must(d.transaction(ctx, body))
	})
	return map[string]any{"seconds": time.Since(started).Seconds(), "first": first}
}

func (d *driver) load(ctx context.Context, n int, rate float64, c int) map[string]any {
	first := d.numbers
	d.numbers += n
	committed := make([]int64, n)
	start := time.Now().Add(time.Millisecond)
	spread(n, c, func(i int) {
		intended := start.Add(time.Duration(float64(i) / rate * float64(time.Second)))
		time.Sleep(time.Until(intended))
		must(d.transaction(ctx, d.body(first+i, intended)))
		committed[i] = time.Now().UnixMicro()
	})
	return map[string]any{"first": first, "committed": committed}
}

func (d *driver) obey(ctx context.Context, what string, numbers []float64) map[string]any {
	whole := func(i int) int { return int(numbers[i]) }
	switch what {
	case "prepare":
		_, err := d.pool.Exec(ctx, "CREATE TABLE bench_orders (id bigint PRIMARY KEY, customer text NOT NULL)")
		must(err)
		return map[string]any{"version": d.river.prepare(ctx)}
	case "business":
		return d.many(ctx, whole(0), whole(1), false)
	case "publish":
		return d.many(ctx, whole(0), whole(1), true)
	case "load":
		return d.load(ctx, whole(0), numbers[1], whole(2))
	case "run":
		d.river.run(ctx)
	case "confirmed":
		return map[string]any{"confirmed": d.confirmed.Load()}
	case "pending":
		return map[string]any{"pending": d.river.pending(ctx)}
	case "stop":
		d.river.stop(ctx)
	default:
		must(fmt.Errorf("no such command: %s", what))
	}
	return map[string]any{}
}

func main() {
	ctx := context.Background()
	d := &driver{}
	must(json.Unmarshal([]byte(os.Args[2]), &d.config))
	options, err := pgxpool.ParseConfig(d.config.Database)
	must(err)
	// The publishers' and as many again for River.
	options.MaxConns = int32(2 * d.config.Connections)
	d.pool, err = pgxpool.NewWithConfig(ctx, options)
	must(err)
	connection, err := amqp.Dial(d.config.AMQP)
	must(err)
	d.channel, err = connection.Channel()
	must(err)
	must(d.channel.Confirm(false))
	d.river = newPeer(d)

	stdin := bufio.NewScanner(os.Stdin)
	for stdin.Scan() {
		words := strings.Fields(stdin.Text())
		if words[0] == "quit" {
			break
		}
		numbers := make([]float64, len(words)-1)
		for i, word := range words[1:] {
			numbers[i], err = strconv.ParseFloat(word, 64)
			must(err)
		}
		answer := d.obey(ctx, words[0], numbers)
		answer["done"] = words[0]
		line, err := json.Marshal(answer)
		must(err)
		fmt.Println(string(line))
	}
	must(connection.Close())
	d.pool.Close()
}
