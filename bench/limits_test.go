package bench

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
)

// limits are the promises: by the name of the benchmark and of the figure.
var limits = map[string]limit{
	"OneNode/Sequential/rueidis p50/raw":        {most: 1.15},
	"OneNode/Sequential/goredis p50/raw":        {most: 1.15},
	"OneNode/Sequential/rueidis allocs/pair":    {most: 14},
	"OneNode/Parallel64/rueidis pairs/raw":      {least: 0.65},
	"OneNode/Parallel64/rueidis pairs/peer":     {least: 1},
	"FiveNodes/Sequential/rueidis p50/raw":      {most: 1.2},
	"FiveNodes/Sequential/goredis p50/raw":      {most: 1.2},
	"FiveNodes/Parallel64/rueidis pairs/raw":    {least: 1.1},
	"TwoOfFiveFrozen/rueidis acquire/healthy":   {most: 1.2},
	"TwoOfFiveFrozen/rueidis cycle/healthy":     {most: 1.2},
	"TwoOfFiveFrozen/goredis acquire/healthy":   {most: 1.2},
	"TwoOfFiveFrozen/goredis cycle/healthy":     {most: 1.2},
	"TwoOfFiveDead/rueidis acquire/healthy":     {most: 1.2},
	"TwoOfFiveDead/rueidis cycle/healthy":       {most: 1.2},
	"TwoOfFiveDead/goredis acquire/healthy":     {most: 1.2},
	"TwoOfFiveDead/goredis cycle/healthy":       {most: 1.2},
	"ColdStart/rueidis granted":                 {least: 1},
	"ColdStart/goredis granted":                 {least: 1},
	"Held10000/rueidis requests/s":              {most: 1100},
	"Held10000/rueidis goroutines/lease":        {most: 0.01},
	"Held10000/rueidis bytes/lease":             {most: 1024},
	"Guard/PostgreSQL/transfer/column p50/bare": {most: 1.35},
	"Guard/PostgreSQL/transfer/table p50/bare":  {most: 1.6},
	"Guard/MariaDB/transfer/column p50/bare":    {most: 1.35},
	"Guard/MariaDB/transfer/table p50/bare":     {most: 1.6},
	"Gateway/Parallel16 p50/plain":              {most: 1.3},
	"Gateway/Parallel64 p50/plain":              {most: 1.3},
}

// limit is what a figure may be. Zero bounds nothing.
type limit struct{ most, least float64 }

func (l limit) String() string {
	switch {
	case l.most > 0:
		return fmt.Sprintf("<= %g", l.most)
	case l.least > 0:
		return fmt.Sprintf(">= %g", l.least)
	}
	return ""
}

func (l limit) broken(v float64) bool {
	return l.most > 0 && v > l.most || l.least > 0 && v < l.least
}

// table is what the run has measured, in order.
var table struct {
	sync.Mutex
	rows []row
}

type row struct {
	line, figure          string
	median, lowest, upper float64
	limit                 limit
	judged                bool
	note                  string
}

// figure reports the median of what the repetitions measured, and judges it where there is a
// limit and enough of them.
func figure(b *testing.B, line, name string, values ...float64) {
	b.Helper()
	slices.Sort(values)
	r := row{line: line, figure: name, median: values[len(values)/2], lowest: values[0], upper: values[len(values)-1],
		limit: limits[line+" "+name], judged: !testing.Short()}
	if r.limit != (limit{}) { // the others are in the table
		b.ReportMetric(r.median, line[strings.LastIndexByte(line, '/')+1:]+"-"+name)
	}
	if r.judged && r.limit.broken(r.median) {
		b.Errorf("%s: %s is %.3g (%.3g to %.3g), and must be %v", line, name, r.median, r.lowest, r.upper, r.limit)
	}
	add(r)
}

// remark puts a sentence into the table.
func remark(line, text string) { add(row{line: line, note: text}) }

func add(r row) {
	table.Lock()
	defer table.Unlock()
	table.rows = append(table.rows, r)
}

func TestMain(m *testing.M) {
	code := m.Run()
	if len(table.rows) > 0 {
		fmt.Printf("\n%-34s %-18s %9s  %-20s %-9s\n", "work", "figure", "median", "spread", "limit")
	}
	for _, r := range table.rows {
		if r.note != "" {
			fmt.Printf("%-34s %s\n", r.line, r.note)
			continue
		}
		verdict := r.limit.String()
		if r.judged && r.limit.broken(r.median) {
			verdict += "  BROKEN"
		}
		fmt.Printf("%-34s %-18s %9.4g  %-20s %s\n", r.line, r.figure, r.median, fmt.Sprintf("%.4g..%.4g", r.lowest, r.upper), verdict)
	}
	os.Exit(code)
}
