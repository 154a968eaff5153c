package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// refusedBy runs the command, which ends with that code and whose last line has all the texts and no
// password.
func refusedBy(t *testing.T, want int, texts []string, args ...string) {
	t.Helper()
	code, out, errs := verbIn(t, []string{"HOLDFAST_CONFIG=/dev/null"}, args...)
	lines := strings.Split(strings.TrimSpace(errs), "\n")
	last := lines[len(lines)-1]
	if code != want || out != "" || strings.Contains(errs, "hunter2") {
		t.Errorf("holdfast %q: code %d, want %d: %s%s", args, code, want, out, errs)
	}
	for _, text := range texts {
		if !strings.Contains(last, text) {
			t.Errorf("holdfast %q does not say %q: %s", args, text, errs)
		}
	}
}

func once(url string) []string {
	return []string{"run", "--wait", "4s", "--store", url, "k", "--", "echo", "ran"}
}

func claims(url string) []string {
	return []string{"fence", "claim", "-w", "2s", "--marks", url, "r", "5"}
}

// A URL that leads to a server of another kind, or asks for TLS where there is none, or for none where
// there is, is told of with what to do.
func TestWrongServers(t *testing.T) {
	certs := servertest.TLS(t)
	redis := servertest.Redis(t, aged, servertest.WithTLS(certs))
	pg, my := servertest.PostgreSQL(t), servertest.MariaDB(t)
	etcd := servertest.Etcd(t, "../../conformance/etcdserver")
	etcds := servertest.Etcd(t, "../../conformance/etcdserver", servertest.EtcdTLS(certs))
	zk := servertest.ZooKeeper(t)
	for _, c := range []struct{ url, says string }{
		{"rediss://" + redis.Addr(), "TLS"},
		{"redis://" + redis.TLSAddr(), "TLS"},
		{"redis://" + my.Addr(), "its own port"},
		{"redis://" + pg.Addr(), "its own port"},
		{"etcds://" + etcd.Addr(), "no TLS on that port"},
		{"etcd://" + etcds.Addr(), "TLS"},
		{"etcd://" + redis.Addr(), "its own port"},
		{"zk://" + redis.Addr(), redis.Addr()},
		{"redis://" + zk.Addr(), "its own port"},
		{"postgres://u:hunter2@" + redis.Addr() + "/d", "its own port"},
		{"postgres://u:hunter2@" + my.Addr() + "/d", "its own port"},
		{"mysql://u:hunter2@" + redis.Addr() + "/d", "its own port"},
		{"mysql://u:hunter2@" + pg.Addr() + "/d", "its own port"},
		{"postgres://u:hunter2@" + pg.Addr() + "/d?sslmode=require", "no TLS on that port"},
		{"mysql://u:hunter2@" + my.Addr() + "/d?tls=true", "no TLS on that port"},
	} {
		t.Run(strings.ReplaceAll(c.url, "/", "_"), func(t *testing.T) {
			t.Parallel()
			refusedBy(t, exitFailed, []string{c.says}, once(c.url)...)
			if strings.HasPrefix(c.url, "postgres") || strings.HasPrefix(c.url, "mysql") {
				refusedBy(t, exitFailed, []string{strings.ReplaceAll(c.says, theURL, theMarks)}, claims(c.url)...)
			}
		})
	}
}

// A server that does not let us in says why once, and we say what to do.
func TestWrongLogins(t *testing.T) {
	t.Run("redis", func(t *testing.T) {
		s := servertest.Redis(t, aged, servertest.Config("requirepass", "right"), servertest.As("", "right"))
		refusedBy(t, exitFailed, []string{"wants a password", loginAdvice}, once("redis://"+s.Addr())...)
		refusedBy(t, exitFailed, []string{"WRONGPASS", loginAdvice}, once("redis://:hunter2@"+s.Addr())...)
		refusedBy(t, exitFailed, []string{"WRONGPASS", strings.ReplaceAll(loginAdvice, theURL, theMarks)}, claims("redis://:hunter2@"+s.Addr())...)
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		s := servertest.PostgreSQL(t)
		for _, c := range []struct{ url, says string }{
			{"postgres://nobody:hunter2@" + s.Addr() + "/holdfast", "refuses the user or its password"},
			{strings.Replace(s.URL(""), "/holdfast?", "/nodb?", 1), "does not exist on the server; create it"},
		} {
			refusedBy(t, exitFailed, []string{c.says}, once(c.url)...)
			refusedBy(t, exitFailed, []string{c.says, "invalid database"}, claims(c.url)...)
		}
	})
	t.Run("etcd", func(t *testing.T) {
		s := servertest.Etcd(t, "../../conformance/etcdserver")
		if code, _, errs := verbIn(t, nil, once("etcd://root:hunter2@"+s.Addr())...); code != 0 { // as the help says
			t.Errorf("without logins: code %d: %s", code, errs)
		}
		withLogins(t, s)
		refusedBy(t, exitFailed, []string{"refuses the user or its password", loginAdvice}, once("etcd://root:hunter2@"+s.Addr())...)
		refusedBy(t, exitFailed, []string{"refuses the user or its password", loginAdvice}, "status", "--store", "etcd://root:hunter2@"+s.Addr(), "k")
		refusedBy(t, exitFailed, []string{"refuses the credentials", loginAdvice}, once("etcd://"+s.Addr())...)
	})
	t.Run("MariaDB", func(t *testing.T) {
		s := servertest.MariaDB(t)
		mustExec(t, openDB(t, "mysql", s.DSN("")), "CREATE USER bob IDENTIFIED BY 'right'")
		for _, c := range []struct{ url, says string }{
			{"mysql://bob:hunter2@" + s.Addr() + "/holdfast", "refuses the user or its password"},
			{"mysql://bob:right@" + s.Addr() + "/nodb", "grant SELECT, INSERT and UPDATE"},
			{strings.Replace(s.URL(""), "/holdfast", "/nodb", 1), "does not exist on the server; create it"},
		} {
			refusedBy(t, exitFailed, []string{c.says}, once(c.url)...)
			refusedBy(t, exitFailed, []string{c.says, "invalid database"}, claims(c.url)...)
		}
	})
}

// Paths that cannot be a store, or marks, are named.
func TestWrongFiles(t *testing.T) {
	dir := t.TempDir()
	text := written(t, strings.Repeat("this is no database\n", 100))
	refusedBy(t, exitFailed, []string{dir + " is a folder; name a file in it"}, once("sqlite:"+dir)...)
	refusedBy(t, exitFailed, []string{dir + " is a folder; name a file in it"}, claims("sqlite:"+dir)...)
	refusedBy(t, exitFailed, []string{text, "must be an SQLite database"}, once("sqlite:"+text)...)
	check := []string{"fence", "check", "--marks", "sqlite:" + dir + "/none", "r", "5"}
	refusedBy(t, exitFailed, []string{"there are no marks in " + dir + "/none yet", claimFirst}, check...)
}

// Where no ttl is given, the nearest that the store keeps is taken, and times that are given must
// fit it.
func TestNearestTTL(t *testing.T) {
	server := servertest.Redis(t, aged)
	url := "redis://" + server.Addr() + "?max-ttl=2s"
	env := []string{"HOLDFAST_STORE=" + url, "HOLDFAST_CONFIG=/dev/null"}
	for _, args := range [][]string{
		{"run", "-n", "k", "--", "true"},
		{"acquire", "-n", "l"},
		{"run", "-n", "--max-hold", "3s", "m", "--", "true"},
	} {
		if code, _, errs := verbIn(t, env, args...); code != 0 {
			t.Errorf("holdfast %q: code %d: %s", args, code, errs)
		}
	}
	conf := written(t, "ttl = '15s'\n")
	for _, c := range []struct {
		env  string
		args []string
	}{
		{"HOLDFAST_CONFIG=/dev/null", []string{"run", "-n", "--ttl", "15s", "k", "--", "echo", "ran"}},
		{"HOLDFAST_CONFIG=" + conf, []string{"run", "-n", "k", "--", "echo", "ran"}},
		{"HOLDFAST_CONFIG=/dev/null", []string{"run", "-n", "--grace", "6s", "k", "--", "echo", "ran"}},
	} {
		if code, out, errs := verbIn(t, []string{env[0], c.env}, c.args...); code != exitUsage || out != "" {
			t.Errorf("%s holdfast %q: code %d: %s", c.env, c.args, code, errs)
		}
	}
}

// slowStore answers nothing, after a while.
type slowStore struct {
	store.Inspector
	after time.Duration
	asked int
}

func (s *slowStore) Inspect(context.Context, string) (store.Holder, error) {
	s.asked++
	time.Sleep(s.after)
	return store.Holder{}, store.ErrUnavailable
}

func (s *slowStore) List(context.Context, string) iter.Seq2[store.Holder, error] {
	return func(yield func(store.Holder, error) bool) { yield(s.Inspect(context.Background(), "")) }
}

// A store is asked again after an answer that was missing for a moment, and not where it was waited for.
func TestAskedAgain(t *testing.T) {
	for after, want := range map[time.Duration]int{250 * time.Millisecond: inspectTries, 2 * time.Second: 1} {
		synctest.Test(t, func(t *testing.T) {
			s := &slowStore{after: after}
			if _, _, err := inspectKey(t.Context(), s, "k"); !errors.Is(err, store.ErrUnavailable) || s.asked != want {
				t.Errorf("status, after %v: asked %d times, want %d: %v", after, s.asked, want, err)
			}
			s.asked = 0
			for _, err := range listAgain(t.Context(), s, "") {
				if !errors.Is(err, store.ErrUnavailable) || s.asked != want {
					t.Errorf("list, after %v: asked %d times, want %d: %v", after, s.asked, want, err)
				}
			}
			if s.asked == 0 {
				t.Error("list asks nobody")
			}
		})
	}
}

// Who does not wait is not told of a wait.
func TestDeadStore(t *testing.T) {
	for _, url := range []string{"etcd://127.0.0.1:1", "zk://127.0.0.1:1"} {
		t.Run(url[:4], func(t *testing.T) {
			t.Parallel()
			env := []string{"HOLDFAST_STORE=" + url}
			_, _, errs := verbIn(t, env, "run", "-n", "k", "--", "echo", "ran")
			if strings.Contains(errs, "waiting") || strings.Count(errs, "\n") != 1 {
				t.Errorf("run -n: %s", errs)
			}
			for _, args := range [][]string{{"status", "k"}, {"list"}} {
				code, _, errs := verbIn(t, env, args...)
				if code != exitFailed || !strings.Contains(errs, reachAdvice) {
					t.Errorf("%v: code %d: %s", args, code, errs)
				}
			}
		})
	}
}

// The words are those of the verb.
func TestLostTicketWords(t *testing.T) {
	env := []string{"HOLDFAST_STORE=sqlite:" + t.TempDir() + "/x", "HOLDFAST_CONFIG=/dev/null"}
	_, ticket, _ := verbIn(t, env, "acquire", "k")
	ticket = strings.TrimSpace(ticket)
	if code, _, errs := verbIn(t, env, "release", ticket); code != 0 {
		t.Fatal(errs)
	}
	for _, name := range []string{"extend", "release"} {
		code, _, errs := verbIn(t, env, name, ticket)
		if want := fmt.Sprintf("holdfast: %s \"k\" on sqlite: lease lost", name); code != exitLost || !strings.HasPrefix(errs, want) {
			t.Errorf("code %d: %s; want %s", code, errs, want)
		}
	}
}

// An upstream without a scheme is refused with how to write it.
func TestUpstreamForm(t *testing.T) {
	for _, raw := range []string{"127.0.0.1:7801", "localhost", "ftp://x"} {
		if _, err := parseUpstream(raw); err == nil || !strings.Contains(err.Error(), "http://HOST[:PORT]") {
			t.Errorf("%s: %v", raw, err)
		}
	}
}

// withLogins makes root the user of an etcd server.
func withLogins(t *testing.T, s *servertest.EtcdServer) {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Addr()}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	_, err = client.UserAdd(t.Context(), "root", "right")
	if err == nil {
		_, err = client.UserGrantRole(t.Context(), "root", "root")
	}
	if err == nil {
		_, err = client.AuthEnable(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// What people can do depends on the error alone.
func TestAdvice(t *testing.T) {
	noHost := &net.DNSError{Err: "no such host", Name: "nohost"}
	for _, c := range []struct {
		err  error
		want string
	}{
		{fmt.Errorf("%w: lookup: %w", store.ErrUnavailable, noHost), reachAdvice},
		{fmt.Errorf("x: %w", &net.OpError{Op: "dial", Err: noHost}), reachAdvice},
		{&net.OpError{Op: "read", Err: errors.New("connection reset by peer")}, ""},
		{errors.New("there is no session with ZooKeeper; a quorum of its servers must be reachable"), reachAdvice},
		{errors.New("there is no session with ZooKeeper: what it answers is not ZooKeeper's protocol"), ""},
		{errors.New("a: tls error: server refused TLS connection"), noTLSAdvice},
		{errors.New("a: tls error: server refused TLS connection a: received unexpected message: %!w(<nil>)"), answerAdvice},
		{errors.New("a: tls error: server refused TLS connection a: lost"), ""},
		{errors.New("127.0.0.1:1: no answer within 250ms"), answerAdvice},
		{fmt.Errorf("127.0.0.1:1: %w", context.DeadlineExceeded), answerAdvice},
		{&store.HeldError{Holder: store.Holder{Label: "host:1"}}, ""},
		{store.ErrLost, ""},
	} {
		if got := advice(c.err); got != c.want {
			t.Errorf("%v: %q, want %q", c.err, got, c.want)
		}
	}
}
