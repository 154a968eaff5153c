package sqlstore

import (
	"errors"
	"strings"

	"github.com/holdfast-go/holdfast/store"
)

// fault is an error of the database: what it means to the caller, in words that name no
// path, and what the driver said.
type fault struct {
	kind  error // store.ErrUnavailable, store.ErrUncertain or a *store.InvalidError
	text  string
	cause error
}

func (f *fault) Error() string {
	if f.text == "" {
		return f.kind.Error()
	}
	return f.kind.Error() + ": " + f.text
}

func (f *fault) Unwrap() []error {
	if f.cause == nil {
		return []error{f.kind}
	}
	return []error{f.kind, f.cause}
}

func unavailable(text string, cause error) error { return &fault{store.ErrUnavailable, text, cause} }

func uncertain(cause error) error {
	return &fault{store.ErrUncertain, oneLine(cause), cause}
}

func badDatabase(rule string, cause error) error {
	return &fault{kind: &store.InvalidError{Field: "database", Rule: rule}, cause: cause}
}

// Primary result codes of SQLite (https://www.sqlite.org/rescode.html), and the words by
// which an error is known whose driver tells no code.
const (
	codeError    = 1
	codePerm     = 3
	codeBusy     = 5
	codeLocked   = 6
	codeReadonly = 8
	codeIOErr    = 10
	codeCorrupt  = 11
	codeFull     = 13
	codeCantOpen = 14
	codeProtocol = 15
	codeSchema   = 17
	codeAuth     = 23
	codeNotADB   = 26
)

var words = []struct {
	text string
	code int
}{
	{"no such table", codeError},
	{"syntax error", codeError},
	{"database is locked", codeBusy},
	{"database table is locked", codeLocked},
	{"readonly database", codeReadonly},
	{"disk i/o error", codeIOErr},
	{"disk image is malformed", codeCorrupt},
	{"disk is full", codeFull},
	{"unable to open database", codeCantOpen},
	{"locking protocol", codeProtocol},
	{"not a database", codeNotADB},
}

// code returns the primary result code of an error of SQLite, and zero where it is none.
func code(err error) int {
	var coded interface{ Code() int }
	if errors.As(err, &coded) {
		return coded.Code() & 0xff
	}
	text := strings.ToLower(err.Error())
	for _, w := range words {
		if strings.Contains(text, w.text) {
			return w.code
		}
	}
	return 0
}

// busy reports whether the transaction may succeed when it is tried again.
func busy(err error) bool {
	switch code(err) {
	case codeBusy, codeLocked, codeProtocol, codeSchema:
		return true
	}
	return false
}

const lockedText = "the database is locked by another connection"

// noTable reports whether err says that a table is missing.
func noTable(err error) bool {
	return code(err) == codeError && strings.Contains(err.Error(), "no such table")
}

// classify gives an error of the driver its meaning, where nothing has been committed.
func classify(err error) error {
	switch code(err) {
	case codeBusy, codeLocked, codeProtocol, codeSchema:
		return unavailable(lockedText, err)
	case codeReadonly:
		return badDatabase("is read-only; its file and its directory must be writable", err)
	case codeCantOpen:
		return badDatabase("cannot be opened; its directory must exist, and permissions and the limit of open files must allow it", err)
	case codePerm, codeAuth:
		return badDatabase("must permit the access", err)
	case codeNotADB:
		return badDatabase("must be an SQLite database; the file is something else", err)
	case codeCorrupt:
		return badDatabase("is damaged", err)
	case codeError:
		return badDatabase("refused a statement; its tables must be those of this program: "+oneLine(err), err)
	case codeFull:
		return unavailable("the disk is full", err)
	case codeIOErr:
		return unavailable("the disk failed", err)
	}
	return unavailable(oneLine(err), err)
}

// hasKind reports whether err is one of the kinds of package store.
func hasKind(err error) bool {
	for _, kind := range []error{store.ErrHeld, store.ErrLost, store.ErrReleased, store.ErrUncertain,
		store.ErrUnavailable, store.ErrUnsupported, store.ErrInvalid} {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
