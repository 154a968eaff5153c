package sqlstore

import (
	"errors"
	"strings"

	"github.com/holdfast-go/holdfast/internal/sqlerr"
	"github.com/holdfast-go/holdfast/store"
)

// fault is an error of the database: what it means to the caller, in words that name no
// path but the one that the options name, and what the driver said.
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

const lockedText = "the database is locked by another connection"

// classify gives an error of the driver its meaning, where nothing has been committed.
func classify(err error) error {
	if rule := sqlerr.Entry(err, sqlerr.NoServer); rule != "" {
		return badDatabase(rule, err)
	}
	if sqlerr.SQLiteBusyNow(err) {
		return unavailable(lockedText, err)
	}
	if sqlerr.SQLite(err) == sqlerr.InTx {
		return badDatabase("must have no transaction left open on a connection of the pool; begin transactions by BeginTx", err)
	}
	switch sqlerr.SQLiteCode(err) {
	case sqlerr.SQLiteReadonly:
		return badDatabase("is read-only; its file and its directory must be writable", err)
	case sqlerr.SQLiteCantOpen:
		return badDatabase("cannot be opened; its directory must exist, and permissions and the limit of open files must allow it", err)
	case sqlerr.SQLitePerm, sqlerr.SQLiteAuth:
		return badDatabase("must permit the access", err)
	case sqlerr.SQLiteNotADB:
		return badDatabase("must be an SQLite database; the file is something else", err)
	case sqlerr.SQLiteCorrupt:
		return badDatabase("is damaged", err)
	case sqlerr.SQLiteError:
		return badDatabase("refused a statement; its tables must be those of this program: "+oneLine(err), err)
	case sqlerr.SQLiteFull:
		return unavailable("the disk is full", err)
	case sqlerr.SQLiteIOErr:
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
