package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/holdfast-go/holdfast/fence"
)

// The file of marks is a bbolt database with two buckets. A mark is the token's text, by the
// name of its resource.
var (
	aboutBucket  = []byte("holdfast") // formatName, and completeName once a gateway has all marks
	marksBucket  = []byte("marks")
	formatName   = []byte("format")
	completeName = []byte("complete")
)

const marksFormat = "1"

// marksOptions say how a file of marks is used.
type marksOptions struct {
	wait     time.Duration // for other processes that have the file open; must be positive
	readOnly bool          // Claim is not for use; a file that is missing is not made
	// shared: many claims are made at the same time, and share a commit. All marks are read
	// once, so that damage is found at the start and the resources are counted.
	shared    bool
	committed func(took time.Duration) // told of each commit; may be nil
}

// batchDelay is how long the first claim of a commit waits for others.
const batchDelay = time.Millisecond

// marks is a [fence.Guard] that keeps its marks in a file of its own. A mark is on the disk
// before Claim returns, and survives SIGKILL and a loss of power. One process at a time has the
// file open.
type marks struct {
	path      string
	db        *bbolt.DB
	file      *os.File // bbolt's; path may name another one by now
	made      bool     // there were no marks, nor was there a file that says so
	complete  bool     // marks cannot be missing; see [marks.setComplete]
	write     func(func(*bbolt.Tx) error) error
	committed func(took time.Duration)
	timed     int                   // the transaction whose commit is timed; bbolt's lock for writers guards it
	known     atomic.Int64          // resources
	claims    atomic.Int64          // marks raised since it was opened
	broken    atomic.Pointer[error] // of a commit that failed on the way to the disk

	mu      sync.Mutex
	raising map[string]int // by resource: claims whose commit is not over, whoever waits for it
}

var _ fence.Guard = (*marks)(nil)

// openMarks opens the file, and makes it where it is missing. Errors answer
// [fence.ErrBusy] where another process has it, [fence.ErrInvalid] where it holds something else
// or is damaged, [fence.ErrNoResource] where it is missing and must not be made, and
// [fence.ErrUnavailable].
func openMarks(path string, o marksOptions) (*marks, error) {
	info, err := os.Stat(path)
	switch {
	case err == nil && !info.Mode().IsRegular():
		return nil, refuseMarks(path, "is no file")
	case o.readOnly && (errors.Is(err, fs.ErrNotExist) || err == nil && info.Size() == 0):
		return nil, &fence.Error{Kind: fence.ErrNoResource, Err: fmt.Errorf("there are no marks in %s yet", path)}
	}
	m := &marks{path: path, committed: o.committed, raising: map[string]int{}}
	if err := guarded(path, func() error { return m.open(o) }); err != nil {
		return nil, err
	}
	m.write = m.db.Update
	if o.shared {
		m.db.MaxBatchDelay = batchDelay
		m.write = m.db.Batch
	}
	if err := guarded(path, func() error { return m.begin(o) }); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// open opens the database and locks it.
func (m *marks) open(o marksOptions) (err error) {
	defer func() {
		if m.db == nil && m.file != nil { // where bbolt panics
			m.file.Close()
		}
	}()
	m.db, err = bbolt.Open(m.path, 0o600, &bbolt.Options{
		Timeout:  o.wait,
		ReadOnly: o.readOnly,
		OpenFile: func(path string, flag int, mode fs.FileMode) (_ *os.File, err error) {
			m.file, err = os.OpenFile(path, flag, mode)
			return m.file, err
		},
	})
	_, system := errors.AsType[syscall.Errno](err)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, bolterrors.ErrTimeout):
		return &fence.Error{Kind: fence.ErrBusy, Err: fmt.Errorf("another process, such as a gateway, has the marks file %s open; waited %v", m.path, o.wait)}
	case errors.Is(err, fs.ErrNotExist):
		err = fmt.Errorf("%w; make the folder first", err)
	case errors.Is(err, bolterrors.ErrInvalid):
		return refuseMarks(m.path, "is no file of marks, or is damaged")
	case !system:
		return refuseMarks(m.path, "is damaged: "+err.Error())
	}
	return &fence.Error{Kind: fence.ErrUnavailable, Err: fmt.Errorf("the marks file cannot be opened: %w", err)}
}

// begin makes the buckets where there are none, and reads what is there.
func (m *marks) begin(o marksOptions) error {
	err := m.db.View(func(tx *bbolt.Tx) error {
		about := tx.Bucket(aboutBucket)
		if first, _ := tx.Cursor().First(); first == nil {
			m.made = true
			return nil
		}
		switch {
		case about == nil || tx.Bucket(marksBucket) == nil:
			return refuseMarks(m.path, "is a database of another program")
		case string(about.Get(formatName)) != marksFormat:
			return refuseMarks(m.path, fmt.Sprintf("has format %q, and this holdfast knows format %s", about.Get(formatName), marksFormat))
		}
		m.complete = about.Get(completeName) != nil
		if o.shared {
			return m.count(tx)
		}
		return nil
	})
	if err == nil && o.shared { // what a process that was killed has written need not be on the disk
		if err = m.db.Sync(); err != nil {
			err = &fence.Error{Kind: fence.ErrUnavailable, Err: fmt.Errorf("the marks file %s cannot be written: %w", m.path, err)}
		}
	}
	if err != nil || !m.made {
		return err
	}
	if o.readOnly {
		return &fence.Error{Kind: fence.ErrNoResource, Err: fmt.Errorf("there are no marks in %s yet", m.path)}
	}
	return m.make()
}

// count reads every mark.
func (m *marks) count(tx *bbolt.Tx) error {
	return tx.Bucket(marksBucket).ForEach(func(k, v []byte) error {
		m.known.Add(1)
		if err := fence.CheckResource(string(k)); err != nil {
			return refuseMarks(m.path, "is damaged: "+err.Error())
		}
		_, err := m.parse(string(k), v)
		return err
	})
}

// make makes the buckets, and the file's name in its folder durable.
func (m *marks) make() error {
	err := m.db.Update(func(tx *bbolt.Tx) error {
		about, err := tx.CreateBucket(aboutBucket)
		if err != nil {
			return err
		}
		if _, err := tx.CreateBucket(marksBucket); err != nil {
			return err
		}
		return about.Put(formatName, []byte(marksFormat))
	})
	if err == nil {
		err = syncFolder(filepath.Dir(m.path))
	}
	if err != nil {
		return &fence.Error{Kind: fence.ErrUnavailable, Err: fmt.Errorf("the marks file %s cannot be written: %w", m.path, err)}
	}
	return nil
}

// syncFolder makes a new name in a folder durable, where the system can.
func syncFolder(path string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) { // some file systems have no such thing
		return err
	}
	return nil
}

// setComplete says that no mark can be missing: unknown resources have been refused for long
// enough, or need not be. The file says so, since a restart in the midst of that time begins it
// anew.
func (m *marks) setComplete() error {
	return m.commit("", func(tx *bbolt.Tx) error { return tx.Bucket(aboutBucket).Put(completeName, []byte("1")) })
}

// probe reports whether the marks can be written, and are where path says.
func (m *marks) probe(ctx context.Context) error {
	info, err := os.Stat(m.path)
	if err != nil {
		return fmt.Errorf("the marks file is gone: %w; the next start will not know any resource", err)
	}
	opened, err := m.file.Stat()
	switch {
	case err != nil:
		return fmt.Errorf("the marks file cannot be used: %w", err)
	case !os.SameFile(info, opened):
		return fmt.Errorf("the marks file %s was replaced by another one", m.path)
	}
	_, err = m.ask(ctx, "", fence.ErrUnavailable, func() (fence.Token, error) {
		return 0, m.commit("", func(tx *bbolt.Tx) error {
			return tx.Bucket(aboutBucket).Put(formatName, []byte(marksFormat))
		})
	})
	return err
}

// close waits for the commit that is under way.
func (m *marks) close() {
	_ = m.db.Close() // what was promised is on the disk
}

// Claim implements [fence.Guard]. Where it answers [fence.ErrUncertain] the mark may be raised;
// to claim again is right.
func (m *marks) Claim(ctx context.Context, resource string, t fence.Token) error {
	if err := checkMark(ctx, resource, t); err != nil {
		return err
	}
	mark, err := m.claim(ctx, resource, t)
	return claimed(ctx, resource, t, mark, err)
}

// Check implements [fence.Guard].
func (m *marks) Check(ctx context.Context, resource string, t fence.Token) error {
	if err := checkMark(ctx, resource, t); err != nil {
		return err
	}
	mark, err := m.look(ctx, resource, t)
	return looked(ctx, resource, t, mark, err)
}

func checkMark(ctx context.Context, resource string, t fence.Token) error {
	return cmp.Or(fence.CheckResource(resource), fence.CheckToken(t), ctx.Err())
}

// claimed is the answer of Claim where the mark is what claim says.
func claimed(ctx context.Context, resource string, t, mark fence.Token, err error) error {
	if err == nil && mark > t {
		return fence.Stale(ctx, resource, t, mark)
	}
	return err
}

// looked is the answer of Check where the mark is what look says.
func looked(ctx context.Context, resource string, t, mark fence.Token, err error) error {
	if err != nil {
		return err
	}
	return fence.Compare(ctx, resource, t, mark)
}

// claim raises the mark to t, if it is not higher, and returns it once it is on the disk.
func (m *marks) claim(ctx context.Context, resource string, t fence.Token) (fence.Token, error) {
	return m.ask(ctx, resource, fence.ErrUncertain, func() (mark fence.Token, err error) {
		defer m.beginRaise(resource)()
		var bad error // is none of the commit, which others share
		err = m.commit(resource, func(tx *bbolt.Tx) error {
			bad = guarded(m.path, func() (err error) {
				mark, err = m.raise(tx, resource, t)
				return err
			})
			return nil
		})
		return mark, cmp.Or(err, bad)
	})
}

// look returns the mark, which is zero where there is none. It is read from memory, unless the
// system has taken the page away. bbolt shows what a commit has written before that is on the
// disk: while a claim of the resource is under way, look makes a commit of its own, which comes
// after it.
func (m *marks) look(ctx context.Context, resource string, _ fence.Token) (mark fence.Token, err error) {
	read := func(tx *bbolt.Tx) (err error) {
		mark, err = m.parse(resource, tx.Bucket(marksBucket).Get([]byte(resource)))
		return err
	}
	err = guarded(m.path, func() error { return m.view(resource, read) })
	if err != nil || !m.isRaising(resource) {
		return mark, cmp.Or(err, m.usable(resource)) // the commit of what was read may have failed
	}
	return m.ask(ctx, resource, fence.ErrUnavailable, func() (fence.Token, error) {
		var bad error
		err := m.commit(resource, func(tx *bbolt.Tx) error {
			bad = guarded(m.path, func() error { return read(tx) })
			return nil
		})
		return mark, cmp.Or(err, bad)
	})
}

// Mark implements httpfence.Prompt.
func (m *marks) Mark(resource string) (mark fence.Token) {
	err := guarded(m.path, func() error {
		return m.view(resource, func(tx *bbolt.Tx) (err error) {
			mark, err = m.parse(resource, tx.Bucket(marksBucket).Get([]byte(resource)))
			return err
		})
	})
	if err != nil || m.isRaising(resource) || m.usable(resource) != nil {
		return 0
	}
	return mark
}

// beginRaise is called before a claim asks for its commit, and its result after that is over.
func (m *marks) beginRaise(resource string) (end func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.raising[resource]++
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.raising[resource]--; m.raising[resource] == 0 {
			delete(m.raising, resource)
		}
	}
}

func (m *marks) isRaising(resource string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.raising[resource] > 0
}

// raise raises the mark to t, if it is not higher, and returns it. A mark that need not be raised
// shares the commit all the same: it may be that of a commit that is not on the disk yet.
func (m *marks) raise(tx *bbolt.Tx, resource string, t fence.Token) (mark fence.Token, err error) {
	b := tx.Bucket(marksBucket)
	mark, err = m.parse(resource, b.Get([]byte(resource)))
	if err != nil || mark >= t {
		return mark, err
	}
	first := mark == 0
	tx.OnCommit(func() {
		m.claims.Add(1)
		if first {
			m.known.Add(1)
		}
	})
	return t, b.Put([]byte(resource), []byte(t.String()))
}

// ask does not wait for a disk that hangs for longer than ctx allows. What f does may then
// happen late, which is of kind late.
func (m *marks) ask(ctx context.Context, resource string, late error, f func() (fence.Token, error)) (fence.Token, error) {
	type answer struct {
		mark fence.Token
		err  error
	}
	answers := make(chan answer, 1)
	go func() {
		var a answer
		a.err = guarded(m.path, func() (err error) {
			a.mark, err = f()
			return err
		})
		answers <- a
	}()
	select {
	case a := <-answers:
		return a.mark, a.err
	case <-ctx.Done():
		return 0, &fence.Error{Kind: late, Resource: resource, Err: fmt.Errorf("no answer from the disk: %w", ctx.Err())}
	}
}

func (m *marks) view(resource string, f func(*bbolt.Tx) error) error {
	if err := m.usable(resource); err != nil {
		return err
	}
	err := m.db.View(f)
	if errors.Is(err, bolterrors.ErrDatabaseNotOpen) {
		return &fence.Error{Kind: fence.ErrUnavailable, Resource: resource, Err: errClosed}
	}
	return err
}

var errClosed = errors.New("the marks file is closed")

// commit does f in a transaction, perhaps with others, and returns once it is on the disk. f
// fails only by what bbolt answers.
func (m *marks) commit(resource string, f func(*bbolt.Tx) error) error {
	if err := m.usable(resource); err != nil {
		return err
	}
	err := m.write(func(tx *bbolt.Tx) error {
		if m.committed != nil && m.timed != tx.ID() {
			m.timed = tx.ID()
			began := time.Now()
			tx.OnCommit(func() { m.committed(time.Since(began)) })
		}
		return f(tx)
	})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, bolterrors.ErrDatabaseNotOpen):
		return &fence.Error{Kind: fence.ErrUnavailable, Resource: resource, Err: errClosed}
	case errors.Is(err, syscall.ENOSPC): // bbolt writes pages that are in use by nothing, then their root
		return &fence.Error{Kind: fence.ErrUnavailable, Resource: resource, Err: fmt.Errorf("the marks file %s cannot be written: %w", m.path, err)}
	}
	// After a sync that failed the system may take the pages for written: neither what is read
	// nor the next sync can be trusted.
	err = fmt.Errorf("the marks file %s could not be written: %w; start again once the disk is in order", m.path, err)
	m.broken.CompareAndSwap(nil, &err)
	return &fence.Error{Kind: fence.ErrUncertain, Resource: resource, Err: err}
}

// usable refuses what comes after a commit that failed.
func (m *marks) usable(resource string) error {
	if broken := m.broken.Load(); broken != nil {
		return &fence.Error{Kind: fence.ErrUnavailable, Resource: resource, Err: *broken}
	}
	return nil
}

// parse reads a mark; nil is none, which is zero.
func (m *marks) parse(resource string, v []byte) (fence.Token, error) {
	if v == nil {
		return 0, nil
	}
	t, err := fence.ParseToken(string(v))
	if err != nil {
		return 0, &fence.InvalidError{Field: "mark", Value: string(v), Rule: fmt.Sprintf("of %.80q in %s is no fencing token; the file is damaged", resource, m.path)}
	}
	return t, nil
}

func refuseMarks(path, rule string) error {
	return &fence.InvalidError{Field: "marks file", Value: path, Rule: rule}
}

// guarded makes errors of the panics and the faults with which bbolt answers a damaged file.
func guarded(path string, f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = refuseMarks(path, fmt.Sprintf("is damaged: %.200v", p))
		}
	}()
	return f()
}

// fileMarks is [marks] for programs that have little to ask: each call opens the file, so that
// others can use it between two calls.
type fileMarks struct {
	path string
	wait time.Duration // for others that have the file open
}

var _ fence.Guard = fileMarks{}

// Claim implements [fence.Guard].
func (f fileMarks) Claim(ctx context.Context, resource string, t fence.Token) error {
	mark, err := f.with(ctx, resource, t, false, (*marks).claim)
	return claimed(ctx, resource, t, mark, err)
}

// Check implements [fence.Guard]. It makes no file.
func (f fileMarks) Check(ctx context.Context, resource string, t fence.Token) error {
	mark, err := f.with(ctx, resource, t, true, (*marks).look)
	return looked(ctx, resource, t, mark, err)
}

// with opens the file for one question, and has closed it when it returns.
func (f fileMarks) with(ctx context.Context, resource string, t fence.Token, readOnly bool,
	do func(*marks, context.Context, string, fence.Token) (fence.Token, error)) (fence.Token, error) {
	if err := checkMark(ctx, resource, t); err != nil {
		return 0, err
	}
	wait := f.wait
	if end, ok := ctx.Deadline(); ok {
		wait = max(time.Millisecond, min(wait, time.Until(end)))
	}
	m, err := openMarks(f.path, marksOptions{wait: wait, readOnly: readOnly})
	if err != nil {
		if e, ok := errors.AsType[*fence.Error](err); ok {
			e.Resource = resource
		}
		return 0, err
	}
	defer m.close()
	return do(m, ctx, resource, t)
}
