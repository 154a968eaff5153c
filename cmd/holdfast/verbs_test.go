package main

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cpuguy83/go-md2man/v2/md2man"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// The scripts of the verbs, which TestScripts runs over SQLite, over Redis and Redlock. Those of
// break have servers with a short max-ttl, since that is how long a broken key is taken.
func TestVerbScripts(t *testing.T) {
	for _, c := range []struct {
		nodes  int
		files  []string
		params string
	}{
		{1, []string{"acquire", "status", "ticket_exits", "ticket_use"}, ""},
		{3, []string{"acquire", "status", "ticket"}, ""},
		{1, []string{"break"}, "?max-ttl=3s"},
		{5, []string{"break"}, "?max-ttl=3s"},
	} {
		t.Run(strconv.Itoa(c.nodes)+" "+c.files[0], func(t *testing.T) {
			t.Parallel()
			urls := redisURLs(servertest.RedisN(t, c.nodes, aged))
			for i := range urls {
				urls[i] += c.params
			}
			params := scripts(func(env *testscript.Env) {
				env.Setenv("HOLDFAST_STORE", strings.Join(urls, " "))
				env.Setenv("N", "--wait=2s") // a busy machine may need longer than one attempt has
			})
			for _, f := range c.files {
				found, err := filepath.Glob(filepath.Join(params.Dir, f+"*.txtar"))
				if err != nil {
					t.Fatal(err)
				}
				params.Files = append(params.Files, found...)
			}
			params.Dir = ""
			testscript.Run(t, params)
		})
	}
}

// verb runs holdfast and returns its exit code and output.
func verb(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return verbIn(t, nil, args...)
}

// verbIn runs it in a changed environment.
func verbIn(t *testing.T, env []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs strings.Builder
	cmd := exec.Command("holdfast", args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &errs, 10*time.Second
	if err := cmd.Run(); cmd.ProcessState == nil {
		t.Error(err)
		return -1, "", ""
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// A lock that another library left without a ttl is shown, and broken: it is then free after
// one max-ttl.
func TestForeignWithoutTTL(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(strconv.Itoa(n)+" nodes", func(t *testing.T) {
			t.Parallel()
			servers := servertest.RedisN(t, n, aged)
			for _, s := range servers {
				if _, err := s.Do("SET", "k", "some\nvalue"); err != nil {
					t.Fatal(err)
				}
			}
			flags := []string{"--max-ttl", "2s"}
			for _, u := range redisURLs(servers) {
				flags = append(flags, "--store", u)
			}
			on := func(args ...string) (int, string, string) {
				t.Helper()
				return verb(t, slices.Insert(args, 1, flags...)...)
			}

			code, out, _ := on("status", "k")
			if code != 0 || !strings.Contains(out, "another library's lock") || !strings.Contains(out, "never by itself; holdfast break") || !strings.Contains(out, `"some\nvalue"`) {
				t.Errorf("status: %d, %s", code, out)
			}
			code, out, _ = on("status", "--json", "k")
			var j holderJSON
			if err := json.Unmarshal([]byte(out), &j); err != nil || code != 0 || !j.NoTTL || !j.Foreign || j.Owner != "some\nvalue" || j.TTL != nil || j.State != "held" || len(j.Nodes) != n {
				t.Errorf("status --json: %d, %v, %s", code, err, out)
			}
			if code, _, errs := on("break", "--owner", "another value", "k"); code != exitConflict || !strings.Contains(errs, "nothing was done") {
				t.Errorf("break of another: %d, %s", code, errs)
			}
			if code, out, errs := on("break", "--owner", "some\nvalue", "k"); code != 0 || !strings.Contains(out, "it is free in ") {
				t.Fatalf("break: %d, %s%s", code, out, errs)
			}
			if code, _, errs := on("run", "--ttl", "2s", "-w", "500ms", "k", "--", "true"); code != exitConflict {
				t.Errorf("run at once: %d, %s", code, errs)
			}
			if code, _, errs := on("run", "--ttl", "2s", "-w", "60s", "k", "--", "true"); code != 0 {
				t.Errorf("run: %d, %s", code, errs)
			}
		})
	}
}

// status tells what each node of a Redlock says, and needs a quorum of them.
func TestStatusOfNodes(t *testing.T) {
	servers := servertest.RedisN(t, 3, aged)
	flags := serverFlags(servers)
	on := func(args ...string) (int, string, string) {
		t.Helper()
		return verb(t, slices.Insert(args, 1, flags...)...)
	}
	args := append([]string{"run", "--ttl", "3s", "--label", "me"}, flags...)
	dir := t.TempDir()
	defer os.WriteFile(filepath.Join(dir, "stop"), nil, 0o600)
	launch(t, dir, append(args, "k", "--", "sh", "-c", "while [ ! -e stop ]; do sleep 0.05; done")...)
	eventually(t, "each node has the vote", func() bool {
		return !slices.ContainsFunc(servers, func(s *servertest.RedisServer) bool {
			n, err := s.Do("EXISTS", "k")
			return err != nil || n != int64(1)
		})
	})
	servers[0].Kill()
	code, out, errs := on("status", "k")
	lines := map[string]string{}
	for _, l := range strings.Split(out, "\n") {
		if f := strings.Fields(l); len(f) > 2 && f[0] == "node" {
			lines[f[1]] = l
		}
	}
	if code != 0 || len(lines) != 3 || strings.Contains(lines[servers[0].Addr()], "vote of") || !strings.Contains(lines[servers[1].Addr()], "vote of me, ends in ") || !strings.Contains(lines[servers[2].Addr()], "vote of me") {
		t.Errorf("one node is away: %d, %s%s", code, out, errs)
	}
	servers[1].Kill()
	for _, v := range []string{"status", "break"} {
		code, out, errs = on(v, "k")
		if code != exitFailed || out != "" || !strings.Contains(errs, servers[0].Addr()+": ") || !strings.Contains(errs, servers[1].Addr()+": ") || strings.Count(errs, "\n") != 1 {
			t.Errorf("%s, two nodes are away: %d, %s%s", v, code, out, errs)
		}
	}
	if code, out, errs = on("list"); code != exitFailed || out != "" || !strings.Contains(errs, servers[0].Addr()) {
		t.Errorf("list, two nodes are away: %d, %s%s", code, out, errs)
	}
}

// Servers that take a request and do not answer hold up neither a completion nor a verb.
func TestVerbsOnSilentServer(t *testing.T) {
	t.Parallel()
	server := servertest.Redis(t, aged)
	proxy := servertest.NewProxy(t, server.Addr())
	ticket := filepath.Join(t.TempDir(), "ticket")
	url := "redis://" + proxy.Addr()
	if code, _, errs := verb(t, "acquire", "--store", url, "--ttl", "30s", "--ticket-file", ticket, "k"); code != 0 {
		t.Fatal(errs)
	}
	proxy.BlackHole()
	var asking sync.WaitGroup
	for _, c := range []struct {
		code int
		args []string
	}{
		{0, []string{"__complete", "status", "--store", url, ""}},
		{exitFailed, []string{"status", "--store", url, "k"}},
		{exitFailed, []string{"list", "--store", url}},
		{exitFailed, []string{"break", "--store", url, "k"}},
		{exitFailed, []string{"extend", "--store", url, "--ticket-file", ticket}},
		{exitFailed, []string{"release", "--store", url, "--ticket-file", ticket}},
	} {
		asking.Go(func() {
			began := time.Now()
			code, out, errs := verb(t, c.args...)
			if code != c.code || strings.Contains(out, "k") || c.code != 0 && strings.Count(errs, "\n") != 1 {
				t.Errorf("%v: %d, %q, %q", c.args, code, out, errs)
			}
			if took := time.Since(began); took > 3*answerLimit {
				t.Errorf("%v took %v", c.args, took)
			}
		})
	}
	asking.Wait()
	before := proxy.Counts().BlackHoled
	if before == 0 {
		t.Error("the black hole swallowed nothing")
	}
	p := launch(t, t.TempDir(), "extend", "--store", url, "--ticket-file", ticket)
	eventually(t, "the black hole swallows the first request", func() bool { return proxy.Counts().BlackHoled > before })
	time.Sleep(time.Second) // far beyond what one attempt waits
	proxy.Heal()
	if code := p.code(); code != 0 {
		t.Errorf("extend is not repeated: %d, %s", code, p.err.String())
	}
	if code, _, errs := verb(t, "release", "--store", url, "--ticket-file", ticket); code != 0 {
		t.Errorf("the ticket is of no use any more: %s", errs)
	}
}

// Where a ticket's ttl ends before the store has answered, the loss says what was in the way.
func TestTicketEndsUnanswered(t *testing.T) {
	t.Parallel()
	server := servertest.Redis(t, aged)
	proxy := servertest.NewProxy(t, server.Addr())
	ticket := filepath.Join(t.TempDir(), "ticket")
	url := "redis://" + proxy.Addr()
	if code, _, errs := verb(t, "acquire", "--store", url, "--ttl", "3s", "--ticket-file", ticket, "k"); code != 0 {
		t.Fatal(errs)
	}
	proxy.BlackHole()
	code, _, errs := verb(t, "release", "--store", url, "--ticket-file", ticket)
	if proxy.Counts().BlackHoled == 0 {
		t.Error("the black hole swallowed nothing")
	}
	if code != exitLost || !strings.Contains(errs, "; before that: "+proxy.Addr()+": no answer within ") || strings.Count(errs, "holdfast: ") != 1 {
		t.Errorf("%d, %s", code, errs)
	}
}

// A holder that is cut off from the store learns by its own clock that the lease is lost.
func TestWhilePIDCutOff(t *testing.T) {
	t.Parallel()
	server := servertest.Redis(t, aged)
	proxy := servertest.NewProxy(t, server.Addr())
	url, dir := "redis://"+proxy.Addr(), t.TempDir()
	if code, _, errs := verb(t, "acquire", "--store", url, "--ttl", "4s", "--ticket-file", filepath.Join(dir, "ticket"), "k"); code != 0 {
		t.Fatal(errs)
	}
	p := launch(t, dir, "extend", "--store", url, "--ticket-file", "ticket", "--while-pid", strconv.Itoa(os.Getpid()))
	taken := time.Now()
	eventually(t, "the lease is extended", func() bool {
		left, err := server.Do("PTTL", "k")
		ms, _ := left.(int64)
		return err == nil && time.Since(taken)+time.Duration(ms)*time.Millisecond > 5*time.Second
	})
	proxy.BlackHole()
	if code := p.code(); code != exitLost {
		t.Errorf("exit code %d", code)
	}
	if text := p.err.String(); !strings.Contains(text, "cannot extend") || !strings.Contains(text, "lease lost: its validity ran out") {
		t.Errorf("stderr: %s", text)
	}
	if proxy.Counts().BlackHoled == 0 {
		t.Error("the black hole swallowed nothing")
	}
}

// A process is watched beyond its id, by both ways of Linux; see watchProcess.
func TestWatchProcess(t *testing.T) {
	for name, watch := range watches {
		t.Run(name, func(t *testing.T) {
			child := exec.Command("sleep", "60")
			if err := child.Start(); err != nil {
				t.Fatal(err)
			}
			gone, err := watch(child.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			select {
			case <-gone:
				t.Error("a process that lives is gone")
			case <-time.After(300 * time.Millisecond):
			}
			if err := child.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			select {
			case <-gone: // nobody has reaped it
			case <-time.After(20 * time.Second):
				t.Error("a process that has ended is not gone")
			}
			_ = child.Wait()
			gone, err = watch(child.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			select {
			case <-gone:
			case <-time.After(20 * time.Second):
				t.Error("a process that does not exist is not gone")
			}
		})
	}
}

// The page of each verb has every word of its help, and what roff takes for a request is none.
func TestManPages(t *testing.T) {
	root := rootCommand()
	for _, cmd := range append(verbs(root), root) {
		page := string(md2man.Render([]byte(manPage(cmd))))
		words := strings.ToLower(strings.Join(strings.Fields(unroff(page)), " "))
		for _, line := range strings.Split(cmd.Long, "\n") {
			want := strings.ToLower(strings.TrimSuffix(strings.Join(strings.Fields(line), " "), ":"))
			if !strings.Contains(words, want) {
				t.Errorf("%s: the page lacks %q", cmd.Name(), want)
			}
		}
		for _, line := range strings.Split(page, "\n") {
			if strings.HasPrefix(line, "'") || regexp.MustCompile(`^\.[^A-Zn]`).MatchString(line) {
				t.Errorf("%s: %q is a request", cmd.Name(), line)
			}
		}
	}
}

// Text of a help means nothing to Markdown or roff.
func TestManText(t *testing.T) {
	for _, text := range []string{"a *b* _c_ **d**", "[e](f) <g> `h` &amp; i|j ~k~", "# l", ".TH m", "'n", `o\p \fBq`, "-- r", "1. s", "- t", "u: v",
		"  .w", "  'x", "  *y* <z> \\fB &lt;"} {
		page := unroff(string(md2man.Render([]byte("# D\n" + manText("First.\n\n"+text+"\n")))))
		if !strings.Contains(page, strings.TrimSpace(text)) {
			t.Errorf("%q becomes %q", text, page)
		}
	}
}

// unroff undoes what roff needs to be escaped.
func unroff(page string) string {
	return strings.NewReplacer(`\-`, "-", `\&`, "", `\fB`, "", `\fP`, "", `\fI`, "", `\fR`, "", `\[la]`, "<", `\[ra]`, ">", `\e`, `\`, `\\`, `\`, `\(aq`, "'").Replace(page)
}

func TestShown(t *testing.T) {
	for s, want := range map[string]string{
		"db1:4711": "db1:4711", "a b": "a b", "é": "é", "": `""`, " a": `" a"`, "a\x1b[31m": `"a\x1b[31m"`, "\xff": `"\xff"`,
		"a\nb": `"a\nb"`, `a"b`: `"a\"b"`, "\u202e": `"\u202e"`, "\ufffd": "\"\ufffd\"",
	} {
		if got := shown(s); got != want {
			t.Errorf("%q is shown as %s, want %s", s, got, want)
		}
	}
}

// FuzzTicketInput reads a ticket as the verbs do, by each way that there is: what is taken is a
// ticket, and what is refused has exit code 64 and is not repeated.
func FuzzTicketInput(f *testing.F) {
	good := store.Ticket{Store: "s", Key: []byte("k"), Owner: "o", Token: fence.Token(7), TTL: time.Second, Boot: "b"}.String()
	for _, s := range []string{good, good + "\n", " " + good, good[:40], good + good, "", "-", "hf1.", "hf2.AAAA", "\x00"} {
		f.Add(s)
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text string) {
		file := filepath.Join(dir, "ticket-"+strconv.Itoa(os.Getpid()))
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		ways := map[string]func() (string, store.Ticket, error){
			"stdin": func() (string, store.Ticket, error) {
				return new(ticketFlags).read([]string{"-"}, strings.NewReader(text))
			},
			"file": func() (string, store.Ticket, error) { return (&ticketFlags{file: file}).read(nil, nil) },
			"argument": func() (string, store.Ticket, error) {
				return new(ticketFlags).read([]string{text}, strings.NewReader(""))
			},
		}
		_, wrong := store.ParseTicket(text)
		for name, read := range ways {
			got, ticket, err := read()
			if err == nil {
				if wrong != nil || got != text || ticket.TTL <= 0 {
					t.Errorf("%s: %q is taken", name, text)
				}
				continue
			}
			e, ok := errors.AsType[*exit](err)
			switch {
			case !ok || e.code != exitUsage || !errors.Is(err, store.ErrInvalid):
				t.Errorf("%s: %q is refused with %v", name, text, err)
			case wrong == nil && len(text) <= maxTicket:
				t.Errorf("%s: a good ticket is refused: %v", name, err)
			case strings.Contains(err.Error(), "\n") || len(text) > 20 && strings.Contains(err.Error(), text):
				t.Errorf("%s: %q is refused in %q", name, text, err)
			}
		}
	})
}

// A system without tickets is told before anything is waited for.
func TestCheckTickets(t *testing.T) {
	if err := checkTickets("linux"); err != nil {
		t.Error(err)
	}
	for _, system := range []string{"darwin", "windows", "freebsd"} {
		e, ok := errors.AsType[*exit](checkTickets(system))
		if !ok || e.code != exitFailed || !errors.Is(e, store.ErrUnsupported) || !strings.Contains(e.Error(), "use holdfast run") {
			t.Errorf("%s: %v", system, e)
		}
	}
}

// A store that cannot tell who holds a key says so.
func TestNoInspector(t *testing.T) {
	_, err := (&opened{Store: plainStore{}}).inspector()
	if e, ok := errors.AsType[*exit](err); !ok || e.code != exitFailed || !errors.Is(err, store.ErrUnsupported) {
		t.Errorf("%v", err)
	}
}

type plainStore struct{ store.Store }
