package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/mattn/go-isatty"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
)

// benchReport is what was measured: the object of --json.
type benchReport struct {
	Version     string         `json:"version"`
	Kind        string         `json:"kind"` // "redlock", "sqlite", "etcd" ...
	Stores      []string       `json:"stores"`
	Quorum      int            `json:"quorum,omitempty"`
	Began       time.Time      `json:"began"`
	Duration    float64        `json:"duration_s"` // of each phase
	MaxOps      int            `json:"max_ops"`
	Parallel    int            `json:"parallel"`
	Clients     int            `json:"clients"`
	Interrupted bool           `json:"interrupted"`
	Operations  []benchFigures `json:"operations"`
	Nodes       []benchNode    `json:"nodes,omitempty"`
	Notes       []string       `json:"notes"`
}

// benchFigures are those of one kind of operation. Without a success only Name, Failed and
// Error are set.
type benchFigures struct {
	Name      string  `json:"name"`
	Count     int     `json:"count"`
	Failed    int     `json:"failed"`
	Error     string  `json:"error,omitempty"` // the first failure
	P50       float64 `json:"p50_ms"`
	P90       float64 `json:"p90_ms"`
	P99       float64 `json:"p99_ms"`
	Max       float64 `json:"max_ms"`
	PerSecond float64 `json:"per_second,omitempty"` // in parallel only
	Pings     float64 `json:"x_ping,omitempty"`     // median over that of the PINGs that it needs
}

// benchNode is what one server answered while the operations ran one at a time.
type benchNode struct {
	Name    string       `json:"name"`
	Ping    benchFigures `json:"ping"`
	Vote    benchFigures `json:"vote"`
	Given   int          `json:"votes_given"`
	Refused int          `json:"votes_refused"`
	Missing int          `json:"votes_missing"` // no answer, or not asked
}

func ms(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }

// figures sums a meter up.
func (m *meter) figures(name string) benchFigures {
	f := benchFigures{Name: name, Failed: m.failed}
	if m.err != nil {
		f.Error = oneLine.Replace(m.err.Error())
	}
	s := m.sorted(0)
	if f.Count = len(s); f.Count > 0 {
		f.P50, f.P90, f.P99, f.Max = ms(percentile(s, 0.5)), ms(percentile(s, 0.9)), ms(percentile(s, 0.99)), ms(s[len(s)-1])
	}
	return f
}

// over sets what the operation takes in units of its pings.
func (f benchFigures) over(ping benchFigures, pings float64) benchFigures {
	if f.Count > 0 && ping.Count > 0 && ping.P50 > 0 {
		f.Pings = f.P50 / (pings * ping.P50)
	}
	return f
}

func (b *bench) report() *benchReport {
	r := &benchReport{Version: version(), Kind: b.stores[0].Info().Name, Began: b.began.UTC().Truncate(time.Second),
		Duration: b.f.duration.Seconds(), MaxOps: b.f.maxOps, Parallel: b.f.parallel, Clients: b.f.clients}
	for _, t := range b.targets {
		r.Stores = append(r.Stores, t.shown())
	}
	ping := b.cyclePing.figures("ping")
	parallel := b.parallel.figures("in parallel")
	if b.parallelTook > 0 {
		parallel.PerSecond = float64(parallel.Count) / b.parallelTook.Seconds()
	}
	r.Operations = []benchFigures{
		b.cycle.figures("acquire and release").over(ping, 2),
		b.acquire.figures("acquire").over(ping, 1),
		b.release.figures("release").over(ping, 1),
		b.extend.figures("extend").over(b.extendPing.figures("ping"), 1),
		parallel,
		b.handOver.figures("hand-over"),
	}
	if b.pings != nil {
		r.Quorum = b.pings.quorum
		r.Operations = append(r.Operations, ping)
		for _, n := range b.pings.nodes {
			r.Nodes = append(r.Nodes, b.node(n))
		}
	}
	r.Notes = b.notes(r)
	return r
}

func (b *bench) node(n *pinged) benchNode {
	of := benchNode{Name: n.name, Ping: n.figures("ping")}
	if v := b.nodes.nodes[n.name]; v != nil {
		of.Vote, of.Given, of.Refused = v.votes.figures("vote"), v.given, v.refused
	}
	of.Vote.Name = "vote"
	of.Missing = max(0, b.acquires-of.Given-of.Refused)
	return of
}

// lateMachine is the 99th percentile of how late the system wakes us up, from which on
// the machine is called loaded.
const lateMachine = 5 * time.Millisecond

// notes say what has been seen that the figures do not tell.
func (b *bench) notes(r *benchReport) []string {
	notes := []string{}
	note := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	for _, o := range r.Operations {
		if o.Failed > 0 {
			note("%s: %d failed, the first with: %s", o.Name, o.Failed, o.Error)
		}
	}
	for _, n := range r.Nodes {
		if answers := n.Given + n.Refused; answers == 0 && b.acquires > 0 {
			note("%s gave no vote: it is down, too young to vote, or not reachable from here", n.Name)
		} else if n.Missing*10 > b.acquires {
			note("%s missed %d of %d votes: it is slow or overloaded, or the network loses packets", n.Name, n.Missing, b.acquires)
		}
	}
	if late := b.late.sorted(0); len(late) > 0 {
		if d := percentile(late, 0.99); d > lateMachine {
			note("this machine is loaded, if only by this measurement: one in a hundred times it woke us up more than %v late, and the figures have that in them", d.Round(time.Millisecond))
		}
	}
	note("not seen from here: load by others at this moment, a proxy before the store, other machines, failures (see holdfast bench --help)")
	return notes
}

// failure is an error where a phase that has run had no success.
func (r *benchReport) failure() error {
	for _, o := range r.Operations {
		if o.Count == 0 && o.Failed > 0 {
			return &exit{exitFailed, errors.New(o.Name + ": nothing succeeded: " + o.Error)}
		}
	}
	return nil
}

func (r *benchReport) print(to io.Writer, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(to)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	for _, t := range [][][]string{r.operationRows(), r.nodeRows()} {
		if err := printTable(to, t); err != nil {
			return err
		}
	}
	for _, n := range r.Notes {
		if _, err := fmt.Fprintln(to, "note: "+n); err != nil {
			return err
		}
	}
	return nil
}

func (r *benchReport) operationRows() [][]string {
	rows := [][]string{{"ms", "count", "p50", "p90", "p99", "max", "x ping", "per second"}}
	for _, o := range r.Operations {
		name := o.Name
		switch name {
		case "in parallel":
			name = fmt.Sprintf("by %d in parallel", r.Parallel)
		case "hand-over":
			name = fmt.Sprintf("hand-over, %d clients", r.Clients)
		case "ping":
			if len(r.Nodes) > 1 {
				name = fmt.Sprintf("ping, %d of %d nodes", r.Quorum, len(r.Nodes))
			}
		}
		rows = append(rows, []string{name, strconv.Itoa(o.Count), cell("%.3f", o.P50), cell("%.3f", o.P90), cell("%.3f", o.P99),
			cell("%.3f", o.Max), cell("%.2f", o.Pings), cell("%.0f", o.PerSecond)})
	}
	return rows
}

func (r *benchReport) nodeRows() [][]string {
	if len(r.Nodes) == 0 {
		return nil
	}
	rows := [][]string{{"node, ms", "ping p50", "p99", "vote p50", "p99", "votes", "refused", "missing"}}
	for _, n := range r.Nodes {
		rows = append(rows, []string{n.Name, cell("%.3f", n.Ping.P50), cell("%.3f", n.Ping.P99), cell("%.3f", n.Vote.P50), cell("%.3f", n.Vote.P99),
			strconv.Itoa(n.Given), strconv.Itoa(n.Refused), strconv.Itoa(n.Missing)})
	}
	return rows
}

// printTable prints rows with the first column to the left and the others to the right.
func printTable(to io.Writer, rows [][]string) error {
	if len(rows) == 0 {
		return nil
	}
	first := 0
	for _, r := range rows {
		first = max(first, utf8.RuneCountInString(r[0]))
	}
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, r := range rows {
		fmt.Fprintf(w, "%-*s\t%s\t\n", first, r[0], strings.Join(r[1:], "\t")) // w keeps the first error
	}
	fmt.Fprintln(w)
	return w.Flush()
}

// cell leaves out what was not measured.
func cell(format string, v float64) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf(format, v)
}

// bars show the phases on a terminal. Elsewhere they are nothing.
type bars struct{ p *mpb.Progress }

func newBars() *bars {
	if !isatty.IsTerminal(os.Stderr.Fd()) && !isatty.IsCygwinTerminal(os.Stderr.Fd()) {
		return &bars{}
	}
	return &bars{mpb.New(mpb.WithOutput(os.Stderr), mpb.WithWidth(72))}
}

// phase shows a bar that follows the budget, with the median of what the meter has of late,
// until done is called.
func (s *bars) phase(name string, m *meter, g *budget) (done func()) {
	if s.p == nil {
		return func() {}
	}
	const total = 1000
	figure := func(decor.Statistics) string {
		n := m.count()
		of := m.sorted(n - 500)
		if len(of) == 0 {
			return "-"
		}
		return fmt.Sprintf("%d  p50 %.3f ms", n, ms(percentile(of, 0.5)))
	}
	bar := s.p.AddBar(total,
		mpb.PrependDecorators(decor.Name(name, decor.WC{W: 14, C: decor.DindentRight})),
		mpb.AppendDecorators(decor.Any(figure, decor.WC{W: 24})))
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				bar.SetCurrent(min(int64(g.share()*total), total-1)) // the last step is the end of the phase
			case <-end:
				return
			}
		}
	}()
	return func() {
		close(end)
		<-ended
		if g.ctx.Err() != nil {
			bar.Abort(false)
		} else {
			bar.SetCurrent(total)
		}
	}
}

func (s *bars) close() {
	if s.p != nil {
		s.p.Wait()
	}
}
