package main

import (
	"context"
	"log/slog"
	"os"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

const module = "github.com/riverqueue/river"

type sendArgs struct {
	Body string `json:"body"`
}

func (sendArgs) Kind() string { return "send" }

type sender struct {
	river.WorkerDefaults[sendArgs]
	driver *driver
}

func (s *sender) Work(ctx context.Context, job *river.Job[sendArgs]) error {
	return s.driver.send(ctx, strconv.FormatInt(job.ID, 10), job.Args.Body)
}

type peer struct {
	driver *driver
	client *river.Client[pgx.Tx]
}

func newPeer(d *driver) *peer {
	workers := river.NewWorkers()
	river.AddWorker(workers, &sender{driver: d})
	client, err := river.NewClient(riverpgxv5.New(d.pool), &river.Config{
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		// "Throughput is limited by this value", says its documentation; the default is 100 ms. FetchPollInterval stays at
		// its default of 1 s: it is the fallback of LISTEN/NOTIFY, which is on.
		FetchCooldown: 5 * time.Millisecond,
		// As many jobs are fetched at a time as workers are free. Goroutines that wait for a confirm cost little, so:
		// many. Finished jobs are written back in batches by default.
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 500}},
		Workers: workers,
	})
	must(err)
	return &peer{driver: d, client: client}
}

// Answers the version.
func (p *peer) prepare(ctx context.Context) string {
	migrator, err := rivermigrate.New(riverpgxv5.New(p.driver.pool), nil)
	must(err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	must(err)
	info, _ := debug.ReadBuildInfo()
	for _, dependency := range info.Deps {
		if dependency.Path == module {
			return dependency.Version
		}
	}
	return ""
}

// The documented way of adding a job within the caller's own transaction.
func (p *peer) publish(ctx context.Context, tx pgx.Tx, body string) error {
	_, err := p.client.InsertTx(ctx, tx, sendArgs{Body: body}, nil)
	return err
}

func (p *peer) run(ctx context.Context) { must(p.client.Start(ctx)) }

func (p *peer) stop(ctx context.Context) { must(p.client.Stop(ctx)) }

func (p *peer) pending(ctx context.Context) (n int) {
	must(p.driver.pool.QueryRow(ctx, "SELECT count(*) FROM river_job WHERE state <> 'completed'").Scan(&n))
	return n
}
