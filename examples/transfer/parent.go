package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// report is what a run has to tell.
type report struct {
	config
	counts
	audit
	pauses atomic.Int64
	took   time.Duration
}

// run lets workers make the transfers while it stops and continues them, and audits the books.
func run(ctx context.Context, c config) (*report, error) {
	dir, err := os.MkdirTemp("", "transfer")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if c.DB == "" {
		c.DB = filepath.Join(dir, "bank.db")
	}
	if c.Store == "" {
		c.Store = filepath.Join(dir, "locks.db")
	}
	b, end, err := open(c)
	if err != nil {
		return nil, err
	}
	defer end()
	if err := b.db.reset(ctx, c.Accounts); err != nil {
		return nil, err
	}
	if b.guard != nil {
		if err := b.guard.EnsureSchema(ctx); err != nil {
			return nil, err
		}
	}
	r := &report{config: c}
	start := time.Now()
	if err := r.runWorkers(ctx); err != nil {
		return nil, err
	}
	r.took = time.Since(start)
	r.audit, err = b.db.audit(ctx, c.Accounts, c.Transfers)
	return r, err
}

// runWorkers starts the workers, and waits until all have ended or one has failed.
func (r *report) runWorkers(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var workers []*worker
	var working, pausing sync.WaitGroup
	for i := range r.Workers {
		w, err := startWorker(ctx, workerConfig{r.config, i})
		if err != nil {
			cancel(err)
			break
		}
		workers = append(workers, w)
		working.Go(func() {
			if err := w.wait(); err != nil {
				cancel(fmt.Errorf("worker %d: %w", i, err))
			}
		})
	}
	stop := make(chan struct{})
	for range max(1, len(workers)/4) {
		pausing.Go(func() { r.pauseWorkers(workers, stop) })
	}
	working.Wait()
	close(stop)
	pausing.Wait()
	for _, w := range workers {
		r.counts.add(w.counts)
	}
	return context.Cause(ctx)
}

// pauseWorkers stops one random worker after the other for longer than its leases last.
func (r *report) pauseWorkers(workers []*worker, stop <-chan struct{}) {
	for r.Pauses && len(workers) > 0 {
		if workers[rand.N(len(workers))].pause(r.TTL + rand.N(r.TTL)) {
			r.pauses.Add(1)
		}
		select {
		case <-stop:
			return
		case <-time.After(rand.N(2 * r.Think)):
		}
	}
}

// worker is a worker process.
type worker struct {
	counts // once it has ended

	cmd     *exec.Cmd
	stdin   io.Closer
	stdout  io.Reader
	pausing sync.Mutex
}

// startWorker starts this program again, as a worker. It is killed when ctx ends.
func startWorker(ctx context.Context, c workerConfig) (*worker, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	w := &worker{cmd: exec.CommandContext(ctx, exe)}
	w.cmd.Env = append(os.Environ(), workerVariable+"="+string(text))
	w.cmd.Stderr = os.Stderr
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if w.stdout, err = w.cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	return w, w.cmd.Start()
}

// wait waits until the worker is done, and ends it.
func (w *worker) wait() error {
	err := json.NewDecoder(w.stdout).Decode(&w.counts)
	w.pausing.Lock() // for ever: the process id may soon be another's
	w.stdin.Close()
	return cmp.Or(w.cmd.Wait(), err)
}

// pause stops the worker for a while, and reports whether it has. The shell does it, since
// that continues the worker also where this process is killed meanwhile. Where there is no
// such shell, nobody is stopped.
func (w *worker) pause(d time.Duration) bool {
	if !w.pausing.TryLock() {
		return false // by another, or at its end
	}
	defer w.pausing.Unlock()
	const script = `kill -STOP "$0" && sleep "$1" && kill -CONT "$0"`
	pid, seconds := strconv.Itoa(w.cmd.Process.Pid), fmt.Sprintf("%.3f", d.Seconds())
	return exec.Command("sh", "-c", script, pid, seconds).Run() == nil
}

// String is the report in words.
func (r *report) String() string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-10s "+format+"\n", append([]any{name}, args...)...)
	}
	line("transfers", "%d of %d, by %d processes in %v", r.Made, r.Transfers, r.Workers, r.took.Round(time.Second/10))
	line("pauses", "%d, each longer than the leases' ttl of %v", r.pauses.Load(), r.TTL)
	if r.Guard {
		line("guard", "refused %d stale tokens: %d at the write, %d at the claim", r.Stale, r.StaleWrites, r.Stale-r.StaleWrites)
	} else {
		line("guard", "OFF")
	}
	line("retries", "%d: %d stale, %d busy, %d lost leases that were noticed, %d others",
		r.Stale+r.Busy+r.Lost+r.Failed, r.Stale, r.Busy, r.Lost, r.Failed)
	line("ledger", "%d transfers missing, %d made twice; %d accounts differ from it", r.missing, r.doubled, r.wrong)
	line("money", "%d, expected %d", r.sum, r.expected)
	verdict := "the money is right"
	if !r.ok() {
		verdict = "THE MONEY IS WRONG"
	}
	line("verdict", "%s", verdict)
	return b.String()
}
