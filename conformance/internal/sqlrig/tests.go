package sqlrig

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// Children are what a test binary can be as a child, for [kit.Main].
func Children(engines ...Engine) map[string]func() {
	all := map[string]func(){}
	for _, e := range engines {
		all["hold "+e.Name] = e.holdChild
	}
	return all
}

func (e Engine) child(t testing.TB, s *servertest.SQLServer, key string) *kit.Process {
	t.Helper()
	return kit.Child(t, "hold "+e.Name, e.DSN(s, ""), key)
}

func (e Engine) holdChild() {
	args := kit.Args()
	db, err := sql.Open(e.Driver, args[0])
	if err != nil {
		kit.Say("error", err)
		return
	}
	s, err := sqlstore.New(db, sqlstore.Options{Dialect: e.Dialect, Database: "server/holdfast"})
	if err != nil {
		kit.Say("error", err)
		return
	}
	if len(args) > 2 { // a statement that runs on one of the store's connections meanwhile
		go db.Exec(args[2])
	}
	kit.Hold(s, args[1], childTTL)
}

const childTTL = time.Second

// CutOffTest: a holder that is cut off from the server knows of the loss before another can
// acquire.
func (e Engine) CutOffTest(t *testing.T) {
	const ttl = 2 * time.Second
	server := e.Start(t)
	p := servertest.NewProxy(t, server.Addr())
	c := kit.CutOff{Locks: kit.Locker(t, e.Open(t, server, p.Addr()), holdfast.Options{TTL: ttl}), Next: e.Open(t, server, ""), Proxy: p, TTL: ttl}
	kit.Warm(t, c.Locks)
	runs, smallest := kit.Count(2, 100), time.Hour
	for i := range runs {
		smallest = min(smallest, c.Run(t, fmt.Sprint("k", i)))
	}
	t.Logf("%d runs: the holder knew first, at the least by %v; ttl %v, drift %v", runs, smallest.Round(10*time.Microsecond), ttl, store.Drift(ttl))
}

// StoppedTest: a holder that is stopped beyond its ttl wakes to a lost lease. LOS-08.
func (e Engine) StoppedTest(t *testing.T) {
	servertest.CanPause(t)
	server := e.Start(t)
	next := e.Open(t, server, "")
	var late []time.Duration
	for i := range kit.Count(2, 20) {
		key := fmt.Sprint("k", i)
		late = append(late, kit.StopHolder(t, e.child(t, server, key), next, key, childTTL))
	}
	t.Logf("%d runs: cancelled %v after waking (median), %v at the most", len(late), kit.Median(late).Round(time.Microsecond), kit.Quantile(late, 1).Round(time.Microsecond))
}

// KilledTest: a holder that is killed keeps the key for its ttl and no longer, whatever its
// connection was doing.
func (e Engine) KilledTest(t *testing.T, statement string) {
	server := e.Start(t)
	s := e.Open(t, server, "")
	child := kit.Child(t, "hold "+e.Name, e.DSN(server, ""), "k", statement)
	child.Expect(t, "held", time.Minute)
	Held(t, s, "k")
	child.Kill()
	ctx := kit.Context(t, 20*childTTL)
	start := time.Now()
	if _, err := Acquire(ctx, Claim(s, "k")); err != nil {
		t.Fatalf("the key of a killed holder: %v", err)
	}
	t.Logf("granted %v after the holder was killed, with a ttl of %v", time.Since(start).Round(time.Millisecond), childTTL)
}

// LostRepliesTest loses the reply to one call of each kind, again and again: nothing of it is left.
func (e Engine) LostRepliesTest(t *testing.T) {
	server := e.Start(t)
	p := servertest.NewProxy(t, server.Addr())
	s, other := e.Open(t, server, p.Addr()), e.Open(t, server, "")
	Free(t, s, "warm-up")
	var last fence.Token
	for i := range kit.Count(20, 500) {
		key := fmt.Sprint("k", i%7)
		c := Claim(s, key)
		lose := func(op string, call func() error) {
			t.Helper()
			d := p.DropReplyTo(servertest.Containing("update holdfast_leases"))
			err := call()
			d.Stop()
			if !errors.Is(err, store.ErrUncertain) || d.Count() == 0 {
				t.Fatalf("%s whose reply is lost (%d): %v, want ErrUncertain", op, d.Count(), err)
			}
		}
		if i >= 7 { // the row is there
			lose("Try", func() error { _, err := c.Try(t.Context()); return err })
			Held(t, other, key)
		}
		var g store.Grant
		if i%2 == 0 {
			if g = Grant(t, c); g.Token <= last {
				t.Fatalf("token %v after %v", g.Token, last)
			}
			last = g.Token
			lose("Extend", func() error { _, err := c.Extend(t.Context()); return err })
			if x, err := c.Extend(t.Context()); err != nil || x.Token != g.Token {
				t.Fatalf("Extend again: %+v, %v", x, err)
			}
			lose("Release", func() error { return c.Release(t.Context()) })
		}
		Release(t, c)
		if g := Free(t, other, key); g.Token <= last {
			t.Fatalf("token %v after %v", g.Token, last)
		} else {
			last = g.Token
		}
	}
}

// LateTest has the caller of a Try leave, and release, while the request is on its way to the server.
// Nothing is left of it, since it was not given up at once.
func (e Engine) LateTest(t *testing.T) {
	server := e.Start(t)
	p := servertest.NewProxy(t, server.Addr())
	s, other := e.Open(t, server, p.Addr()), e.Open(t, server, "")
	Free(t, s, "k")
	late := p.Hold(servertest.Only(1, servertest.Containing("update holdfast_leases")))
	c := Claim(s, "k")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if g, err := c.Try(ctx); !errors.Is(err, store.ErrUncertain) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Try of which nothing is heard in time: %+v, %v, want ErrUncertain", g, err)
	}
	released := make(chan error, 1)
	go func() { released <- c.Release(kit.Context(t, time.Minute)) }()
	time.Sleep(100 * time.Millisecond)
	late.Release()
	if late.Count() == 0 {
		t.Fatal("nothing was late: the test shows nothing")
	}
	if err := <-released; err != nil {
		t.Errorf("Release: %v", err)
	}
	SoonFree(t, other, "k")
}

// EveryCallTest makes every call of a store once, so that each statement runs.
func (e Engine) EveryCallTest(t *testing.T, s *sqlstore.Store) {
	t.Helper()
	ctx, prefix := t.Context(), t.Name()+"/"
	keys := []string{prefix + "a", prefix + "b", prefix + "\xff\x01'\\%_"}
	var claims []store.Claim
	var tokens []fence.Token
	for _, k := range keys {
		c := Claim(s, k)
		claims, tokens = append(claims, c), append(tokens, Grant(t, c).Token)
		Held(t, s, k)
	}
	if _, err := claims[0].Extend(ctx); err != nil {
		t.Errorf("Extend: %v", err)
	}
	for i, r := range s.ExtendMany(ctx, claims) {
		if r.Err != nil || r.Grant.Token != tokens[i] {
			t.Errorf("ExtendMany, %d: %+v, want token %v", i, r, tokens[i])
		}
	}
	if g, err := claims[0].Try(ctx); err != nil || g.Token != tokens[0] {
		t.Errorf("Try of the holder: %+v, %v, want its token %v", g, err, tokens[0])
	}
	var listed []string
	for h, err := range s.List(ctx, prefix) {
		if err != nil {
			t.Fatal(err)
		}
		if h.TTL < 59*time.Minute || h.TTL > time.Hour || h.Label != "test" {
			t.Errorf("List answers %+v", h)
		}
		listed = append(listed, h.Key)
	}
	if !slices.Equal(listed, keys) {
		t.Errorf("List answers %q, want %q", listed, keys)
	}
	h, err := s.Inspect(ctx, keys[1])
	if err != nil || h.Token != tokens[1] {
		t.Errorf("Inspect: %+v, %v", h, err)
	}
	for range 2 {
		if err := s.Break(ctx, h); err != nil {
			t.Errorf("Break: %v", err)
		}
	}
	if _, err := claims[1].Extend(ctx); !errors.Is(err, store.ErrLost) {
		t.Errorf("Extend of a broken lease: %v, want ErrLost", err)
	}
	if r := s.ExtendMany(ctx, claims); r[0].Err != nil || !errors.Is(r[1].Err, store.ErrLost) || r[2].Err != nil {
		t.Errorf("ExtendMany with a broken one among them: %+v", r)
	}
	for _, i := range []int{0, 2} {
		Release(t, claims[i])
		if g := Free(t, s, keys[i]); g.Token <= tokens[i] {
			t.Errorf("token %v after %v", g.Token, tokens[i])
		}
	}
	if err := s.EnsureSchema(ctx); err != nil {
		t.Errorf("EnsureSchema: %v", err)
	}
}

// ContendTest has the stores of many processes begin at once, on an empty database, and increment
// a counter under the lock, which only exclusion makes right.
func (e Engine) ContendTest(t *testing.T, opts ...servertest.SQLOption) {
	server := e.Start(t, opts...)
	stores, rounds := 8, kit.Count(8, 300)
	ctx := kit.Context(t, 5*time.Minute)
	counter, last := 0, fence.Token(0)
	var wg sync.WaitGroup
	for range stores {
		s := e.Open(t, server, "")
		wg.Go(func() {
			for range rounds {
				c := s.Claim("counter", store.ClaimOptions{TTL: time.Minute, Wait: true})
				g, err := Acquire(ctx, c)
				if err != nil {
					t.Errorf("acquire: %v", err)
					return
				}
				n := counter
				if g.Token <= last {
					t.Errorf("token %v after %v", g.Token, last)
				}
				last = g.Token
				if _, err := c.Extend(ctx); err != nil {
					t.Errorf("extend: %v", err)
				}
				counter = n + 1
				if err := c.Release(ctx); err != nil {
					t.Errorf("release: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if want := stores * rounds; counter != want {
		t.Errorf("the counter is %d after %d increments", counter, want)
	}
}

// FirstTest has many processes ask for the same new key at once: one gets it, and nobody an
// error.
func (e Engine) FirstTest(t *testing.T, opts ...servertest.SQLOption) {
	server := e.Start(t, opts...)
	var stores []store.Store
	for range 8 {
		stores = append(stores, e.Open(t, server, ""))
	}
	for i := range kit.Count(10, 300) {
		var wg sync.WaitGroup
		var granted, held int
		var mu sync.Mutex
		for _, s := range stores {
			wg.Go(func() {
				_, err := Claim(s, fmt.Sprint("new", i)).Try(t.Context())
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					granted++
				case errors.Is(err, store.ErrHeld):
					held++
				default:
					t.Errorf("Try of a new key: %v", err)
				}
			})
		}
		wg.Wait()
		if granted != 1 || held != len(stores)-1 {
			t.Fatalf("a new key was granted to %d of %d, and refused to %d", granted, len(stores), held)
		}
	}
}

// ManyTest extends more leases than one batch holds.
func (e Engine) ManyTest(t *testing.T) {
	const n = 600
	server := e.Start(t)
	s, other := e.Open(t, server, ""), e.Open(t, server, "")
	var claims []store.Claim
	var tokens []fence.Token
	for i := range n {
		c := s.Claim(fmt.Sprintf("%d", i), store.ClaimOptions{TTL: time.Minute + time.Duration(i)*time.Second, Label: "test"})
		claims, tokens = append(claims, c), append(tokens, Grant(t, c).Token)
	}
	alone := map[int]store.Claim{} // the same leases, of which nothing is known to be lost
	for _, i := range []int{50, 300} {
		ticket, err := s.Ticket(claims[i])
		if err != nil {
			t.Fatal(err)
		}
		if alone[i], _, err = other.Adopt(t.Context(), ticket); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(1500 * time.Millisecond)
	broken := []int{0, 100, 255, 256, 599}
	for _, i := range broken {
		h, err := other.Inspect(t.Context(), fmt.Sprint(i))
		if err != nil {
			t.Fatal(err)
		}
		if err := other.Break(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
	db := e.DB(t, e.DSN(server, ""))
	for i, set := range map[int]string{50: "token = token + 1", 300: "owner = 'x'"} { // as a later grant
		broken = append(broken, i)
		Exec(t, db, fmt.Sprintf("UPDATE holdfast_leases SET %s WHERE token = %d", set, tokens[i]))
		if _, err := claims[i+1].Extend(t.Context()); err != nil {
			t.Errorf("lease %d: %v", i+1, err)
		}
		if _, err := alone[i].Extend(t.Context()); !errors.Is(err, store.ErrLost) {
			t.Errorf("Extend of a lease whose row has another grant (%s): %v, want ErrLost", set, err)
		}
	}
	before := time.Now()
	for i, r := range s.ExtendMany(t.Context(), claims) {
		if lost := slices.Contains(broken, i); lost != errors.Is(r.Err, store.ErrLost) || !lost && r.Err != nil {
			t.Errorf("lease %d, broken %v: %v", i, lost, r.Err)
		}
	}
	for h, err := range other.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		var i int
		fmt.Sscan(h.Key, &i)
		if want := time.Minute + time.Duration(i)*time.Second; !h.Broken && (h.TTL > want || h.TTL < want-time.Since(before)) && !slices.Contains(broken, i) {
			t.Errorf("lease %d has %v left, %v after it was extended by %v", i, h.TTL, time.Since(before), want)
		}
	}
}

// TokensTest: tokens grow also when the server's clock has gone back, and end with an error.
func (e Engine) TokensTest(t *testing.T) {
	server := e.Start(t)
	s := e.Open(t, server, "")
	db := e.DB(t, e.DSN(server, ""))
	before := Free(t, s, "k").Token
	ahead := time.Now().Add(time.Hour).UnixMicro()
	Exec(t, db, fmt.Sprintf("UPDATE holdfast_leases SET token = %d", ahead))
	if g := Free(t, s, "k"); int64(g.Token) != ahead+1 {
		t.Errorf("token %v after %d, with a clock that has gone back", g.Token, ahead)
	}
	Exec(t, db, "DELETE FROM holdfast_leases") // as a failover may
	if g := Free(t, s, "k"); g.Token <= before {
		t.Errorf("token %v after %v, whose row was lost", g.Token, before)
	}
	Exec(t, db, fmt.Sprintf("UPDATE holdfast_leases SET token = %d", int64(math.MaxInt64)))
	if g, err := Claim(s, "k").Try(t.Context()); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("Try of a key without tokens: %+v, %v", g, err)
	}
	if n := Query[int](t, db, "SELECT count(*) FROM holdfast_leases"); n != 1 {
		t.Errorf("%d rows, want 1 that stays", n)
	}
}

// OneConnectionTest: a pool of one connection neither locks up, nor gives a key twice. PGS-16, SQL-13.
func (e Engine) OneConnectionTest(t *testing.T) {
	server := e.Start(t)
	db := e.DB(t, e.DSN(server, ""))
	db.SetMaxOpenConns(1)
	s := e.New(t, db, sqlstore.Options{})
	locks := kit.Locker(t, s, holdfast.Options{TTL: time.Second})
	var wg sync.WaitGroup
	holders := 0
	for range 4 {
		wg.Go(func() {
			for range 3 {
				lease, err := locks.Acquire(kit.Context(t, time.Minute), "k")
				if err != nil {
					t.Error(err)
					return
				}
				if holders++; holders != 1 { // also a race, where it is wrong
					t.Errorf("%d hold", holders)
				}
				time.Sleep(50 * time.Millisecond)
				holders--
				if err := lease.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	// The connection is in use by the caller: an error in time, and nothing taken.
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if g, err := Claim(s, "k").Try(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Try without a connection: %+v, %v, want DeadlineExceeded", g, err)
	}
	conn.Close()
	Free(t, s, "k")
}

// ServerKilledTest: leases and tokens outlive the server, and who waits for the lock waits for it.
func (e Engine) ServerKilledTest(t *testing.T) {
	server := e.Start(t)
	s, other := e.Open(t, server, ""), e.Open(t, server, "")
	c := Claim(s, "k")
	g := Grant(t, c)
	server.Kill()
	if _, err := c.Extend(t.Context()); !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUncertain) {
		t.Errorf("Extend without a server: %v", err)
	}
	if _, err := Claim(other, "k").Try(t.Context()); !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUncertain) {
		t.Errorf("Try without a server: %v", err)
	}
	locks := kit.Locker(t, other, holdfast.Options{})
	acquired := make(chan error, 1)
	go func() {
		lease, err := locks.Acquire(kit.Context(t, time.Minute), "k")
		if err == nil && lease.Token() <= g.Token {
			err = fmt.Errorf("token %v after %v", lease.Token(), g.Token)
		}
		if err == nil {
			err = lease.Release(context.Background())
		}
		acquired <- err
	}()
	server.Restart()
	steady(t, func() error { _, err := c.Extend(t.Context()); return err })
	Held(t, other, "k")
	steady(t, func() error { return c.Release(t.Context()) })
	if err := <-acquired; err != nil {
		t.Errorf("who waits while the server is away: %v", err)
	}
}

// steady repeats a call that had no answer.
func steady(t testing.TB, call func() error) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := call()
		if err == nil {
			return
		}
		if !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUncertain) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// DroppedTest: tables that are dropped under a store are not made anew behind everybody's back.
func (e Engine) DroppedTest(t *testing.T) {
	server := e.Start(t)
	s := e.Open(t, server, "")
	db := e.DB(t, e.DSN(server, ""))
	Free(t, s, "k")
	Exec(t, db, "DROP TABLE holdfast_leases")
	if g, err := Claim(s, "k").Try(t.Context()); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("Try without a table: %+v, %v", g, err)
	}
	for _, statement := range sqlstore.Schema(e.Dialect) { // as an administrator would
		Exec(t, db, statement)
	}
	Free(t, s, "k")
	Exec(t, db, "DELETE FROM holdfast_meta") // another is about to write it
	Free(t, e.Open(t, server, ""), "k")
	Exec(t, db, "UPDATE holdfast_meta SET value = '2'")
	Refuses(t, e.Open(t, server, ""), store.ErrInvalid, `version "2"`)
}
