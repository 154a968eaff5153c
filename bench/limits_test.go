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
	"OneNode/Sequential/rueidis p50/raw":            {most: 1.15},
	"OneNode/Sequential/goredis p50/raw":            {most: 1.15},
	"OneNode/Sequential/rueidis allocs/pair":        {most: 14},
	"OneNode/Parallel64/rueidis pairs/raw":          {least: 0.65},
	"OneNode/Parallel64/rueidis pairs/peer":         {least: 1},
	"FiveNodes/Sequential/rueidis p50/raw":          {most: 1.2},
	"FiveNodes/Sequential/goredis p50/raw":          {most: 1.2},
	"FiveNodes/Parallel64/rueidis pairs/raw":        {least: 1.1},
	"TwoOfFiveFrozen/rueidis acquire/healthy":       {most: 1.2},
	"TwoOfFiveFrozen/rueidis cycle/healthy":         {most: 1.2},
	"TwoOfFiveFrozen/goredis acquire/healthy":       {most: 1.2},
	"TwoOfFiveFrozen/goredis cycle/healthy":         {most: 1.2},
	"TwoOfFiveDead/rueidis acquire/healthy":         {most: 1.2},
	"TwoOfFiveDead/rueidis cycle/healthy":           {most: 1.2},
	"TwoOfFiveDead/goredis acquire/healthy":         {most: 1.2},
	"TwoOfFiveDead/goredis cycle/healthy":           {most: 1.2},
	"ColdStart/rueidis granted":                     {least: 1},
	"ColdStart/goredis granted":                     {least: 1},
	"Held10000/rueidis requests/s":                  {most: 1100},
	"Held10000/rueidis goroutines/lease":            {most: 0.01},
	"Held10000/rueidis bytes/lease":                 {most: 1024},
	"Queue/OneNode/Empty/rueidis rate/blpop":        {least: 0.4},
	"Queue/OneNode/Empty/rueidis jain":              {least: 0.99},
	"Queue/OneNode/Empty/goredis rate/blpop":        {least: 0.4},
	"Queue/OneNode/Empty/goredis jain":              {least: 0.99},
	"Queue/OneNode/Busy/rueidis gap/blpop":          {most: 2.2},
	"Queue/OneNode/Busy/rueidis jain":               {least: 0.99},
	"Queue/OneNode/Busy/goredis gap/blpop":          {most: 2.2},
	"Queue/OneNode/Busy/goredis jain":               {least: 0.99},
	"Queue/FiveNodes/Empty/rueidis rate/peer":       {least: 1.5},
	"Queue/FiveNodes/Empty/rueidis rate/fair-peer":  {least: 3},
	"Queue/FiveNodes/Empty/rueidis jain":            {least: 0.99},
	"Queue/FiveNodes/Empty/goredis rate/peer":       {least: 1.5},
	"Queue/FiveNodes/Empty/goredis rate/fair-peer":  {least: 3},
	"Queue/FiveNodes/Empty/goredis jain":            {least: 0.99},
	"Queue/OneNode/Requests/rueidis of-4":           {most: 3.2},
	"Queue/OneNode/Requests/rueidis of-16":          {most: 3.2},
	"Queue/OneNode/Requests/rueidis of-256":         {most: 3.2},
	"Queue/OneNode/Requests/rueidis of-4/of-16":     {least: 0.8, most: 1.2},
	"Queue/OneNode/Requests/rueidis of-256/of-16":   {least: 0.8, most: 1.2},
	"Queue/OneNode/Requests/goredis of-4":           {most: 3.2},
	"Queue/OneNode/Requests/goredis of-16":          {most: 3.2},
	"Queue/OneNode/Requests/goredis of-256":         {most: 3.2},
	"Queue/OneNode/Requests/goredis of-4/of-16":     {least: 0.8, most: 1.2},
	"Queue/OneNode/Requests/goredis of-256/of-16":   {least: 0.8, most: 1.2},
	"Queue/FiveNodes/Requests/rueidis of-4":         {most: 18},
	"Queue/FiveNodes/Requests/rueidis of-16":        {most: 18},
	"Queue/FiveNodes/Requests/rueidis of-256":       {most: 18},
	"Queue/FiveNodes/Requests/rueidis of-4/of-16":   {least: 0.8, most: 1.2},
	"Queue/FiveNodes/Requests/rueidis of-256/of-16": {least: 0.8, most: 1.2},
	"Queue/FiveNodes/Requests/goredis of-4":         {most: 18},
	"Queue/FiveNodes/Requests/goredis of-16":        {most: 18},
	"Queue/FiveNodes/Requests/goredis of-256":       {most: 18},
	"Queue/FiveNodes/Requests/goredis of-4/of-16":   {least: 0.8, most: 1.2},
	"Queue/FiveNodes/Requests/goredis of-256/of-16": {least: 0.8, most: 1.2},
	"Queue/Waiters1000/rueidis requests/s":          {most: 10},
	"Queue/Waiters1000/goredis requests/s":          {most: 10},
	"Guard/PostgreSQL/transfer/column p50/bare":     {most: 1.35},
	"Guard/PostgreSQL/transfer/table p50/bare":      {most: 1.6},
	"Guard/MariaDB/transfer/column p50/bare":        {most: 1.35},
	"Guard/MariaDB/transfer/table p50/bare":         {most: 1.6},
	"SQLStore/PostgreSQL/Sequential updates/pair":   {least: 0.5},
	"SQLStore/PostgreSQL/HandOver rate/pglock":      {least: 5},
	"ZooKeeper/Sequential rate/zk.Lock":             {least: 1},
	"ZooKeeper/Parallel64 rate/zk.Lock":             {least: 1},
	"Gateway/Parallel16 p50/plain":                  {most: 1.3},
	"Gateway/Parallel64 p50/plain":                  {most: 1.3},
	"Etcd/Sequential mutex/p50":                     {least: 1},
	"Etcd/Parallel64 pairs/raw":                     {least: 0.9},
	"Etcd/Parallel64 pairs/mutex":                   {least: 1},
	"Etcd/HandOver/process rate/mutex":              {least: 1},
	"Etcd/HandOver/processes rate/mutex":            {least: 1},
}

// beforeLimits are those beside an earlier commit, by the kind of turn.
var beforeLimits = map[string]limit{
	"memstore/Sequential":          {most: 1.05},
	"OneNode/Sequential/rueidis":   {most: 1.05},
	"OneNode/Sequential/goredis":   {most: 1.05},
	"FiveNodes/Sequential/rueidis": {most: 1.05},
	"FiveNodes/Sequential/goredis": {most: 1.05},
	"OneNode/Parallel64/rueidis":   {most: 1.05},
	"OneNode/Parallel64/goredis":   {most: 1.05},
	"FiveNodes/Parallel64/rueidis": {most: 1.05},
	"FiveNodes/Parallel64/goredis": {most: 1.05},
}

// limit is what a figure may be. Zero bounds nothing.
type limit struct{ most, least float64 }

func (l limit) String() string {
	switch {
	case l.most > 0 && l.least > 0:
		return fmt.Sprintf("%g..%g", l.least, l.most)
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

func limitOf(line, name string) limit {
	if kind, ok := strings.CutPrefix(line, "Before/"); ok && name == "time/before" {
		return beforeLimits[kind]
	}
	return limits[line+" "+name]
}

// figure reports the median of what the repetitions measured, and judges it where there is a
// limit and enough of them.
func figure(b testing.TB, line, name string, values ...float64) {
	b.Helper()
	slices.Sort(values)
	r := row{line: line, figure: name, median: values[len(values)/2], lowest: values[0], upper: values[len(values)-1],
		limit: limitOf(line, name), judged: !testing.Short()}
	if b, ok := b.(*testing.B); ok && r.limit != (limit{}) { // the others are in the table
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
		fmt.Printf("\n%-46s %-18s %9s  %-20s %-9s\n", "work", "figure", "median", "spread", "limit")
	}
	for _, r := range table.rows {
		if r.note != "" {
			fmt.Printf("%-46s %s\n", r.line, r.note)
			continue
		}
		verdict := r.limit.String()
		if r.judged && r.limit.broken(r.median) {
			verdict += "  BROKEN"
		}
		fmt.Printf("%-46s %-18s %9.4g  %-20s %s\n", r.line, r.figure, r.median, fmt.Sprintf("%.4g..%.4g", r.lowest, r.upper), verdict)
	}
	os.Exit(code)
}
