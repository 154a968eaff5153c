package sqlguard_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
)

// eachConfig runs f for each configuration, on one server for each engine. Those of MariaDB run
// one after another, since it only counts who waits in the whole server.
func eachConfig(t *testing.T, f func(t *testing.T, i int, d *database, c config, x tables)) {
	t.Run("engines", func(t *testing.T) {
		for _, engine := range engines {
			t.Run(engine, func(t *testing.T) {
				t.Parallel()
				var d *database
				if engine != sqlite3 {
					d = newDatabase(t, engine)
				}
				for i, c := range configs {
					if c.engine != engine {
						continue
					}
					t.Run(c.name, func(t *testing.T) {
						if engine != mariadb {
							t.Parallel()
						}
						d := d
						if engine == sqlite3 {
							d = newDatabase(t, engine)
						}
						f(t, i, d, c, newTables(d, c, fmt.Sprint("_", i)))
					})
				}
			})
		}
	})
}

// matrix collects what each schedule came to in each configuration.
type matrix struct {
	mu    sync.Mutex
	cells map[string]map[int]string // by row, and configuration
	order []string
}

func (m *matrix) put(row string, i int, cell string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cells == nil {
		m.cells = map[string]map[int]string{}
	}
	if m.cells[row] == nil {
		m.cells[row] = map[int]string{}
		m.order = append(m.order, row)
	}
	m.cells[row][i] = cell
}

func (m *matrix) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, name := range []func(config) string{
		func(c config) string { return c.engine },
		func(c config) string { return c.name },
	} {
		for _, c := range configs {
			fmt.Fprintf(w, "\t%s", name(c))
		}
		fmt.Fprintln(w)
	}
	for _, s := range schedules {
		for _, row := range m.order {
			if strings.Fields(row)[0] != s.name {
				continue
			}
			fmt.Fprint(w, row)
			for i := range configs {
				fmt.Fprintf(w, "\t%s", m.cells[row][i])
			}
			fmt.Fprintln(w)
		}
	}
	w.Flush()
	return "\n" + b.String()
}

// Without the guard, the schedules come to what was measured: a plain look at the mark is no
// check at any level of PostgreSQL, and so on. Where they go well, it is by a lock, or because
// the database ends a transaction.
func TestSchedulesByHand(t *testing.T) {
	var m matrix
	eachConfig(t, func(t *testing.T, i int, d *database, c config, x tables) {
		pools := newPools(d, c, x)
		for _, s := range schedules {
			x.reset(t, s.missing)
			r := newRun(t, d, c, x, pools)
			r.checker = byHand{}
			got := r.play(ops(s.steps))
			m.put(s.name, i, got.String())
			if want := s.wanted(i); got.class() != want {
				t.Errorf("%s (%s): %v, want %s; %s", s.name, s.what, got, want, r.told())
			}
		}
	})
	t.Log(&m)
}

// told is how the sessions ended.
func (r *run) told() string {
	return fmt.Sprintf("Old: %d %v; New: %d %v", r.sessions["O"].end, r.sessions["O"].err, r.sessions["N"].end, r.sessions["N"].err)
}
