package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/holdfast-go/holdfast/fence"
)

func mustOpenMarks(t testing.TB, path string, o marksOptions) *marks {
	t.Helper()
	if o.wait == 0 {
		o.wait = 5 * time.Second
	}
	m, err := openMarks(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.close)
	return m
}

func wantErr(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) || want == nil && err != nil {
		t.Errorf("%s: %v, want %v", what, err, want)
	} else if err != nil && strings.Contains(err.Error(), "\n") {
		t.Errorf("%s: not one line: %q", what, err)
	}
}

func TestMarksKeep(t *testing.T) {
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "marks")
	m := mustOpenMarks(t, path, marksOptions{shared: true})
	if !m.made || m.complete {
		t.Errorf("new: made %v, complete %v", m.made, m.complete)
	}
	wantErr(t, "check of none", m.Check(ctx, "a", 5), fence.ErrNoResource)
	wantErr(t, "claim", m.Claim(ctx, "a", 5), nil)
	wantErr(t, "claim again", m.Claim(ctx, "a", 5), nil)
	wantErr(t, "claim of the largest", m.Claim(ctx, "b", math.MaxInt64), nil)
	m.close()
	wantErr(t, "claim when closed", m.Claim(ctx, "a", 5), fence.ErrUnavailable)
	wantErr(t, "check when closed", m.Check(ctx, "a", 5), fence.ErrUnavailable)

	m = mustOpenMarks(t, path, marksOptions{shared: true})
	if m.made || m.complete || m.known.Load() != 2 {
		t.Errorf("again: made %v, complete %v, %d known", m.made, m.complete, m.known.Load())
	}
	wantErr(t, "check", m.Check(ctx, "a", 5), nil)
	wantErr(t, "check above", m.Check(ctx, "a", 6), fence.ErrUnclaimed)
	wantErr(t, "check of the largest", m.Check(ctx, "b", math.MaxInt64), nil)
	err := m.Claim(ctx, "a", 4)
	if stale, ok := errors.AsType[*fence.StaleError](err); !ok || *stale != (fence.StaleError{Resource: "a", Token: 4, Seen: 5}) {
		t.Errorf("claim below: %v", err)
	}
	wantErr(t, "check below", m.Check(ctx, "a", 4), fence.ErrStale)
	wantErr(t, "claim above", m.Claim(ctx, "a", 6), nil)
	wantErr(t, "the former", m.Check(ctx, "a", 5), fence.ErrStale)
	wantErr(t, "complete", m.setComplete(), nil)
	m.close()
	if m = mustOpenMarks(t, path, marksOptions{}); m.made || !m.complete {
		t.Errorf("at last: made %v, complete %v", m.made, m.complete)
	}
	if info, err := os.Stat(path); err != nil || runtime.GOOS != "windows" && info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

func TestMarksTellTheHolder(t *testing.T) {
	m := mustOpenMarks(t, filepath.Join(t.TempDir(), "marks"), marksOptions{})
	told := 0
	ctx := fence.WithHolder(t.Context(), "a", 5, func(*fence.StaleError) { told++ })
	wantErr(t, "claim", m.Claim(ctx, "a", 6), nil)
	wantErr(t, "stale claim", m.Claim(ctx, "a", 5), fence.ErrStale)
	wantErr(t, "stale check", m.Check(ctx, "a", 5), fence.ErrStale)
	if told != 2 {
		t.Errorf("told %d times", told)
	}
}

func TestMarksRefuse(t *testing.T) {
	m := mustOpenMarks(t, filepath.Join(t.TempDir(), "marks"), marksOptions{shared: true})
	done, cancel := context.WithCancel(t.Context())
	cancel()
	for _, do := range []func(context.Context, string, fence.Token) error{m.Claim, m.Check} {
		for _, name := range []string{"", "a\x00", "\xff", strings.Repeat("a", 513)} {
			wantErr(t, fmt.Sprintf("resource %.10q", name), do(t.Context(), name, 1), fence.ErrInvalid)
		}
		wantErr(t, "token 0", do(t.Context(), "a", 0), fence.ErrInvalid)
		wantErr(t, "token -1", do(t.Context(), "a", -1), fence.ErrInvalid)
		wantErr(t, "invalid and done", do(done, "a", 0), fence.ErrInvalid)
		wantErr(t, "done", do(done, "a", 1), context.Canceled)
	}
	if n := m.known.Load(); n != 0 {
		t.Errorf("%d resources are known", n)
	}
}

// Whatever the order in which many claim, marks only grow, and all of them are kept.
func TestMarksConcurrent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "marks")
	var commits, passed, stale atomic.Int64
	m := mustOpenMarks(t, path, marksOptions{shared: true, committed: func(time.Duration) { commits.Add(1) }})
	const resources, most, claimers = 8, 40, 64
	var highest [resources]atomic.Int64 // whose claim has returned
	var wg sync.WaitGroup
	for range claimers {
		wg.Go(func() {
			for range 10 {
				r, tok := rand.IntN(resources), 1+rand.Int64N(most)
				before := highest[r].Load()
				err := m.Claim(t.Context(), fmt.Sprint(r), fence.Token(tok))
				switch {
				case errors.Is(err, fence.ErrStale):
					stale.Add(1)
				case err != nil:
					t.Error(err)
				case tok < before:
					t.Errorf("resource %d: token %d passed after %d", r, tok, before)
				default:
					passed.Add(1)
					for old := highest[r].Load(); old < tok && !highest[r].CompareAndSwap(old, tok); old = highest[r].Load() {
					}
				}
			}
		})
	}
	wg.Wait()
	m.close()
	if commits.Load() >= passed.Load()+stale.Load() || stale.Load() == 0 {
		t.Errorf("%d commits for %d claims, %d of them stale", commits.Load(), passed.Load()+stale.Load(), stale.Load())
	}
	t.Logf("%d commits for %d claims, %d of them stale", commits.Load(), passed.Load()+stale.Load(), stale.Load())
	m = mustOpenMarks(t, path, marksOptions{shared: true})
	for r := range resources {
		if h := highest[r].Load(); h != 0 {
			wantErr(t, "what was claimed", m.Check(t.Context(), fmt.Sprint(r), fence.Token(h)), nil)
		}
	}
}

func TestMarksBusy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "marks")
	m := mustOpenMarks(t, path, marksOptions{})
	for _, readOnly := range []bool{false, true} {
		_, err := openMarks(path, marksOptions{wait: 100 * time.Millisecond, readOnly: readOnly})
		wantErr(t, "second open", err, fence.ErrBusy)
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%v does not name the file", err)
		}
	}
	opened := make(chan error, 1)
	go func() {
		second, err := openMarks(path, marksOptions{wait: time.Minute})
		if err == nil {
			second.close()
		}
		opened <- err
	}()
	time.Sleep(50 * time.Millisecond)
	m.close()
	wantErr(t, "open once it is free", <-opened, nil)

	// Those who only look do not keep each other out.
	a := mustOpenMarks(t, path, marksOptions{readOnly: true})
	wantErr(t, "look", a.Check(t.Context(), "a", 1), fence.ErrNoResource)
	b := mustOpenMarks(t, path, marksOptions{readOnly: true})
	wantErr(t, "look as well", b.Check(t.Context(), "a", 1), fence.ErrNoResource)
}

func TestMarksMissing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "marks")
	_, err := openMarks(path, marksOptions{wait: time.Second, readOnly: true})
	wantErr(t, "to look at no file", err, fence.ErrNoResource)
	if _, err := os.Stat(path); err == nil {
		t.Error("the file was made")
	}
	_, err = openMarks(filepath.Join(dir, "none", "marks"), marksOptions{wait: time.Second})
	wantErr(t, "no folder", err, fence.ErrUnavailable)
	if err == nil || !strings.Contains(err.Error(), "make the folder") {
		t.Error(err)
	}
	_, err = openMarks(dir, marksOptions{wait: time.Second})
	wantErr(t, "a folder", err, fence.ErrInvalid)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = openMarks(path, marksOptions{wait: time.Second, readOnly: true})
	wantErr(t, "to look at an empty file", err, fence.ErrNoResource)
	if m := mustOpenMarks(t, path, marksOptions{}); !m.made {
		t.Error("an empty file holds marks")
	}
}

func bolt(t *testing.T, path string, f func(tx *bbolt.Tx) error) {
	t.Helper()
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.Update(f); err != nil {
		t.Fatal(err)
	}
}

func TestMarksForeign(t *testing.T) {
	dir := t.TempDir()
	refused := func(path, rule string) {
		t.Helper()
		before, _ := os.ReadFile(path)
		for _, o := range []marksOptions{{}, {shared: true}, {readOnly: true}} {
			o.wait = time.Second
			m, err := openMarks(path, o)
			if err == nil {
				m.close()
			}
			wantErr(t, filepath.Base(path), err, fence.ErrInvalid)
			if err == nil || !strings.Contains(err.Error(), rule) || !strings.Contains(err.Error(), path) {
				t.Errorf("%v: says nothing of %q", err, rule)
			}
		}
		if after, _ := os.ReadFile(path); string(after) != string(before) {
			t.Errorf("%s was changed", path)
		}
	}
	for name, text := range map[string]string{"text": "hello\n", "long": strings.Repeat("SQLite format 3\x00", 4096), "zero": strings.Repeat("\x00", 1<<16)} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		refused(path, "no file of marks")
	}
	other := filepath.Join(dir, "other")
	bolt(t, other, func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucket([]byte("theirs"))
		return err
	})
	refused(other, "another program")
	newer := filepath.Join(dir, "newer")
	mustOpenMarks(t, newer, marksOptions{}).close()
	bolt(t, newer, func(tx *bbolt.Tx) error { return tx.Bucket(aboutBucket).Put(formatName, []byte("2")) })
	refused(newer, `format "2"`)
}

// What is no token is never taken for a low one.
func TestMarksInvalidMark(t *testing.T) {
	for _, v := range []string{"", "0", "-1", "05", "+5", "5 ", "0x5", "9223372036854775808", "\x00\x00\x00\x00\x00\x00\x00\x05", "1e3"} {
		path := filepath.Join(t.TempDir(), "marks")
		mustOpenMarks(t, path, marksOptions{}).close()
		bolt(t, path, func(tx *bbolt.Tx) error { return tx.Bucket(marksBucket).Put([]byte("a"), []byte(v)) })
		m := mustOpenMarks(t, path, marksOptions{})
		wantErr(t, fmt.Sprintf("claim at %q", v), m.Claim(t.Context(), "a", math.MaxInt64), fence.ErrInvalid)
		wantErr(t, fmt.Sprintf("check at %q", v), m.Check(t.Context(), "a", 5), fence.ErrInvalid)
		wantErr(t, "another resource", m.Claim(t.Context(), "b", 5), nil)
		m.close()
		_, err := openMarks(path, marksOptions{wait: time.Second, shared: true})
		wantErr(t, fmt.Sprintf("gateway at %q", v), err, fence.ErrInvalid)
	}
}

// Damage is refused, or does not touch what is asked; it never ends the process.
func TestMarksDamaged(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "marks")
	m := mustOpenMarks(t, path, marksOptions{shared: true})
	var wg sync.WaitGroup
	for i := range 500 {
		wg.Go(func() { wantErr(t, "claim", m.Claim(t.Context(), fmt.Sprintf("resource %d", i), 7), nil) })
	}
	wg.Wait()
	m.close()
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	page := os.Getpagesize()
	damages := map[string]func(b []byte) []byte{
		"half":      func(b []byte) []byte { return b[:len(b)/2] },
		"one page":  func(b []byte) []byte { return b[:page] },
		"two pages": func(b []byte) []byte { return b[:2*page] },
		"no metas":  func(b []byte) []byte { clear(b[:2*page]); return b },
		"no pages":  func(b []byte) []byte { clear(b[2*page:]); return b },
		"all ones": func(b []byte) []byte {
			for i := range b[2*page:] {
				b[2*page+i] = 0xff
			}
			return b
		},
	}
	refused := 0
	for name, damage := range damages {
		damaged := damage(append([]byte(nil), whole...))
		for i, o := range []marksOptions{{shared: true}, {}, {readOnly: true}} {
			// Each has a file of its own: where bbolt panics, its lock ends with the process.
			bad := filepath.Join(dir, fmt.Sprintf("%s-%d", strings.ReplaceAll(name, " ", "-"), i))
			if err := os.WriteFile(bad, damaged, 0o600); err != nil {
				t.Fatal(err)
			}
			o.wait = time.Second
			m, err := openMarks(bad, o)
			if err == nil {
				if o.shared || o.readOnly {
					err = m.Check(t.Context(), "resource 1", 7)
				} else {
					err = m.Claim(t.Context(), "resource 1", 8)
				}
				m.close()
			}
			if err != nil {
				wantErr(t, name, err, fence.ErrInvalid)
				refused++
			}
		}
	}
	if refused < 2*len(damages) {
		t.Errorf("damage was refused %d times", refused)
	}
	t.Logf("damage was refused %d times of %d", refused, 3*len(damages))
}

// After a commit that failed half-way nothing of the file is believed.
func TestMarksBroken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "marks")
	m := mustOpenMarks(t, path, marksOptions{shared: true})
	wantErr(t, "claim", m.Claim(t.Context(), "a", 5), nil)
	m.file.Close() // from below bbolt
	err := m.Claim(t.Context(), "a", 6)
	wantErr(t, "the commit that fails", err, fence.ErrUncertain)
	if err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("%v does not name the file", err)
	}
	wantErr(t, "the next claim", m.Claim(t.Context(), "b", 5), fence.ErrUnavailable)
	wantErr(t, "the next check", m.Check(t.Context(), "a", 5), fence.ErrUnavailable)
	if err := m.probe(t.Context()); err == nil {
		t.Error("the probe finds nothing")
	}
}

// A mark counts once it is on the disk, and not while its commit hangs there.
func TestMarksOnTheDisk(t *testing.T) {
	m := mustOpenMarks(t, filepath.Join(t.TempDir(), "marks"), marksOptions{shared: true})
	wantErr(t, "claim", m.Claim(t.Context(), "a", 5), nil)
	written, synced, write := make(chan struct{}, 9), make(chan struct{}), m.write
	var disk sync.Mutex // commits come one after another
	m.write = func(f func(*bbolt.Tx) error) error {
		disk.Lock()
		defer disk.Unlock()
		err := write(f)
		written <- struct{}{}
		<-synced
		return err
	}
	gone, cancel := context.WithCancel(t.Context())
	claim := make(chan error, 1)
	go func() { claim <- m.Claim(gone, "a", 6) }()
	<-written
	cancel() // who asked has gone, and the commit goes on
	wantErr(t, "the claim", <-claim, fence.ErrUncertain)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantErr(t, "check of a mark that is on its way to the disk", m.Check(short, "a", 6), fence.ErrUnavailable)
	wantErr(t, "check of another resource", m.Check(t.Context(), "b", 6), fence.ErrNoResource)
	close(synced)
	wantErr(t, "check of the mark on the disk", m.Check(t.Context(), "a", 6), nil)
	eventually(t, "no claim is under way", func() bool { return !m.isRaising("a") })
}

func TestMarksProbe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "marks")
	m := mustOpenMarks(t, path, marksOptions{shared: true})
	wantErr(t, "probe", m.probe(t.Context()), nil)
	if runtime.GOOS == "windows" { // an open file stays
		return
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := m.probe(t.Context()); err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("removed: %v", err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.probe(t.Context()); err == nil || !strings.Contains(err.Error(), "replaced") {
		t.Errorf("replaced: %v", err)
	}
}

func init() { programs["claimaway"] = claimAway }

// claimAway claims tokens for ever, and says on stdout which it has claimed.
func claimAway() {
	m, err := openMarks(os.Args[1], marksOptions{wait: 10 * time.Second, shared: true})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for i := range 4 {
		go func() {
			name := fmt.Sprint(i)
			for t := fence.Token(1); ; t++ {
				err := m.Claim(context.Background(), name, t)
				switch {
				case errors.Is(err, fence.ErrStale):
					continue
				case err != nil:
					fmt.Fprintln(os.Stderr, err)
					os.Exit(1)
				}
				fmt.Printf("%s %d\n", name, t)
			}
		}()
	}
	select {}
}

// What a process has claimed is there after SIGKILL.
func TestMarksKilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "marks")
	program, err := exec.LookPath("claimaway")
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]fence.Token{}
	for round := range 5 {
		var out strings.Builder
		cmd := exec.Command(program, path)
		cmd.Stdout, cmd.Stderr = &out, os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(200+100*round) * time.Millisecond)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		for line := range strings.Lines(out.String()) {
			var name string
			var tok fence.Token
			if n, _ := fmt.Sscanf(line, "%s %d\n", &name, &tok); n == 2 && strings.HasSuffix(line, "\n") {
				told[name] = max(told[name], tok)
			}
		}
		m := mustOpenMarks(t, path, marksOptions{shared: true})
		for name, tok := range told {
			if err := m.Check(t.Context(), name, tok); err != nil && !errors.Is(err, fence.ErrStale) { // a later one is no loss
				t.Errorf("%s: what was claimed is lost: %v", name, err)
			}
		}
		m.close()
	}
	if len(told) < 4 {
		t.Errorf("claimed %v", told)
	}
	t.Logf("claimed %v", told)
}

func init() { programs["keepmarks"] = keepMarks }

// keepMarks keeps a file of marks open, and says so by a file.
func keepMarks() {
	if _, err := openMarks(os.Args[1], marksOptions{wait: 10 * time.Second}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := os.WriteFile("kept", nil, 0o600); err != nil {
		os.Exit(1)
	}
	time.Sleep(time.Minute)
}
