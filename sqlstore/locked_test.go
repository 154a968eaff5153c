package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

func TestLockedRefusesBeforeIO(t *testing.T) {
	nop := func(*sql.Tx) error { return nil }
	db := new(sql.DB) // no driver: any use panics
	good := LockedOptions{Dialect: PostgreSQL}
	for _, tt := range []struct {
		field string
		db    *sql.DB
		o     LockedOptions
		key   string
		fn    func(*sql.Tx) error
	}{
		{"db", nil, good, "k", nop},
		{"Dialect", db, LockedOptions{}, "k", nop},
		{"Dialect", db, LockedOptions{Dialect: 99}, "k", nop},
		{"LockWait", db, LockedOptions{Dialect: MySQL, LockWait: -1}, "k", nop},
		{"TxOptions", db, LockedOptions{Dialect: SQLite, TxOptions: &sql.TxOptions{ReadOnly: true}}, "k", nop},
		{"key", db, good, "", nop},
		{"key", db, good, strings.Repeat("k", store.MaxKeyLen+1), nop},
		{"key", db, good, "a\x00b", nop},
		{"fn", db, good, "k", nil},
	} {
		var invalid *store.InvalidError
		err := Locked(t.Context(), tt.db, tt.o, tt.key, tt.fn)
		if !errors.As(err, &invalid) || invalid.Field != tt.field || !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%s: %v", tt.field, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Locked(ctx, db, good, "k", nop); err != context.Canceled {
		t.Errorf("with a done context: %v", err)
	}
}

func TestLockedRow(t *testing.T) {
	long := strings.Repeat("\xff", store.MaxKeyLen)
	rows := map[string]string{}
	for _, key := range []string{"a", "A", "a ", "é", "\xe9", "\xff", long, long[1:]} {
		row := lockedRow(key)
		if err := fence.CheckResource(row); err != nil {
			t.Errorf("%q: %v", key, err)
		}
		if other, ok := rows[row]; ok {
			t.Errorf("%q and %q share a row", key, other)
		}
		rows[row] = key
	}
}

func TestLockedError(t *testing.T) {
	cause := errors.New("of the\ndatabase")
	done, cancel := context.WithCancel(t.Context())
	cancel()
	own := &fence.InvalidError{Field: "table"}
	for _, tt := range []struct {
		ctx  context.Context
		err  error
		is   error
		text string
	}{
		{t.Context(), &fence.Error{Kind: fence.ErrBusy, Resource: "k", Err: cause}, store.ErrHeld, "held by another: of the database"},
		{t.Context(), &fence.Error{Kind: fence.ErrBusy, Err: &fnError{&fault{store.ErrHeld, "of an inner one", cause}}}, store.ErrHeld, "held by another: of an inner one"},
		{t.Context(), &fence.Error{Kind: fence.ErrUncertain, Err: cause}, store.ErrUncertain, "outcome uncertain: the store may have acted: of the database"},
		{done, &fence.Error{Kind: fence.ErrUncertain, Err: fmt.Errorf("%w: %w", context.Canceled, cause)}, store.ErrUncertain, "outcome uncertain: the store may have acted: context canceled: of the database"},
		{t.Context(), &fence.Error{Kind: fence.ErrUnavailable, Err: cause}, store.ErrUnavailable, "store unavailable: of the database"},
		{done, fmt.Errorf("sqlfence: %w: nothing was written; last: %w", context.Canceled, cause), context.Canceled, "context canceled: nothing was written; last: of the database"},
		{t.Context(), &fnError{cause}, cause, cause.Error()},
		{t.Context(), &fnError{own}, own, own.Error()},
	} {
		err := lockedError(tt.ctx, nil, tt.err)
		if !errors.Is(err, tt.is) || err.Error() != tt.text {
			t.Errorf("%v: %v, want %s", tt.err, err, tt.text)
		}
	}
	if err := lockedError(t.Context(), nil, nil); err != nil {
		t.Errorf("nil: %v", err)
	}
	if unfitTable(&fnError{own}) || !unfitTable(&fence.Error{Kind: own, Err: cause}) {
		t.Error("an error of fn is not the guard's")
	}
}
