package zkstore

import (
	"context"
	"errors"
	"strings"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast/store"
)

// fault is an error of the servers or the connection: what it means to the caller, and what the
// client library said.
type fault struct {
	kind  error // one of package store, or a *store.InvalidError
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

var (
	errNoAnswer = errors.New("ZooKeeper did not answer in time")
	errGone     = errors.New("the node is gone")
)

func unavailable(cause error) error {
	return &fault{store.ErrUnavailable, oneLine(cause), cause}
}

func uncertain(cause error) error { return &fault{store.ErrUncertain, oneLine(cause), cause} }

func errReleased() error { return &fault{kind: store.ErrReleased} }

// unknown reports whether a request that failed so may have been executed.
func unknown(err error) bool {
	return errors.Is(err, zk.ErrConnectionClosed) || errors.Is(err, zk.ErrClosing)
}

// classify gives an error of the client library its meaning. acts says that the request would have
// changed what the caller asks about.
func classify(err error, acts bool) error {
	switch {
	case err == nil, hasKind(err), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case acts && unknown(err):
		return uncertain(err)
	case errors.Is(err, zk.ErrNoAuth), errors.Is(err, zk.ErrAuthFailed), errors.Is(err, zk.ErrInvalidACL):
		return &fault{&store.InvalidError{Field: "credentials",
			Rule: "must permit everything below the chroot; give the user who made its nodes"}, "", err}
	case strings.HasSuffix(err.Error(), codeNeedsSASL):
		return &fault{store.ErrUnsupported, "the servers want clients to log in by SASL, which this store does not", err}
	case strings.HasSuffix(err.Error(), codeQuota):
		return &fault{store.ErrUnavailable, "the quota of a node above is used up; raise it, or take nodes away", err}
	case errors.Is(err, zk.ErrInvalidPath):
		return &fault{&store.InvalidError{Field: "Chroot", Rule: "is no path of ZooKeeper"}, "", err}
	case errors.Is(err, zk.ErrNoChildrenForEphemerals):
		return &fault{&store.InvalidError{Field: "Chroot", Rule: "must not lie below an ephemeral node"}, "", err}
	}
	return unavailable(err)
}

// Codes that the client library has no error for.
const (
	codeNeedsSASL = "unknown error: -124"
	codeQuota     = "unknown error: -125"
)

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
