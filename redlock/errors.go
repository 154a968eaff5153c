package redlock

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// QuorumError says that too few nodes agreed, and what each one answered. It answers
// [store.ErrUnavailable], or [store.ErrHeld] where enough nodes answered and the votes
// were split; [store.ErrUncertain] where a request to some node may have been executed;
// and [errors.As] finds each [*NodeError].
type QuorumError struct {
	Op     string
	Needed int
	Nodes  []NodeError // one for each configured node, in the order of their names
	kinds  []error
}

// NodeError is the outcome at one node. Err is nil where the node answered.
type NodeError struct {
	Node    string
	Outcome string // the answer, such as "ok", "busy" or "no answer"
	Err     error
}

func (e *NodeError) Error() string {
	if e.Err == nil {
		return e.Node + ": " + e.Outcome
	}
	var bad *store.InvalidError
	if errors.As(e.Err, &bad) && bad.Field == "node" && bad.Value == e.Node {
		return e.Node + ": " + oneLine(bad.Rule) // the name once
	}
	return e.Node + ": " + oneLine(e.Err.Error())
}

// Unwrap returns why the node did not answer.
func (e *NodeError) Unwrap() error { return e.Err }

func (e *QuorumError) Error() string {
	var b strings.Builder
	if len(e.Nodes) > 1 {
		fmt.Fprintf(&b, "%d of %d nodes must agree: ", e.Needed, len(e.Nodes))
	}
	for i := range e.Nodes {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(e.Nodes[i].Error())
	}
	return b.String()
}

// Unwrap returns the kinds of the failure and the outcome of each node without an answer.
func (e *QuorumError) Unwrap() []error {
	errs := append([]error(nil), e.kinds...)
	for i := range e.Nodes {
		if e.Nodes[i].Err != nil {
			errs = append(errs, cause{&e.Nodes[i]})
		}
	}
	return errs
}

// cause leads from a QuorumError to the outcome at one node, but for no kind of failure:
// that one node refuses does not make the whole one final.
type cause struct{ node *NodeError }

func (c cause) Error() string { return c.node.Error() }

func (c cause) As(target any) bool { return errors.As(c.node, target) }

func (c cause) Is(target error) bool {
	switch target {
	case store.ErrHeld, store.ErrLost, store.ErrReleased, store.ErrUncertain, store.ErrUnavailable, store.ErrUnsupported, store.ErrInvalid:
		return false
	}
	return errors.Is(c.node, target)
}

// YoungError says that a server may have forgotten locks and does not vote yet. It answers
// [store.ErrUnavailable].
type YoungError struct {
	Age     time.Duration // since it started, or was promoted
	VotesIn time.Duration
}

func (e *YoungError) Error() string {
	return fmt.Sprintf("started or promoted %v ago, may have forgotten locks, votes in %v",
		e.Age.Round(time.Second), max(time.Second, e.VotesIn.Round(time.Second)))
}

// Is reports whether target is [store.ErrUnavailable].
func (e *YoungError) Is(target error) bool { return target == store.ErrUnavailable }

// errNoAnswer is what a node without an answer in time gets. Nothing is known about the
// request: it may have been executed, or may yet be.
type errNoAnswer struct{ after time.Duration }

func (e errNoAnswer) Error() string {
	return fmt.Sprintf("no answer within %v", e.after.Round(100*time.Microsecond))
}

func (e errNoAnswer) Is(target error) bool { return target == store.ErrUnavailable }

// notAsked is why a node was not asked at all. Nothing can have happened there.
type notAsked struct{ err error }

func (e notAsked) Error() string { return e.err.Error() }
func (e notAsked) Unwrap() error { return e.err }

// refused is what waiting cannot mend: a server that must not be a node of this store, or
// that does not let us in.
type refused struct{ *store.InvalidError }

func refuse(node, rule string) error {
	return refused{&store.InvalidError{Field: "node", Value: node, Rule: rule}}
}

func (e refused) Unwrap() error { return e.InvalidError }

// misconfigured marks a refusal that ends every attempt, whatever the other nodes say: the
// store is not put together right.
type misconfigured struct{ error }

func (e misconfigured) Unwrap() error { return e.error }

// aclRules are what a user needs on every server, beside the patterns of keys and channels
// that aclPatterns names.
const (
	aclRules    = "+eval +evalsha +script|load +info +time +exists +get +mget +set +del +pttl +pexpire +pexpireat +hget +hset +hmget +type +scan +zadd +zcard +zrange +zrank +zrem +zscore +zpopmin +publish +pubsub|numsub +subscribe +unsubscribe"
	aclPatterns = "the keys KEY and {KEY}:* of every lock, {holdfast}:* and the channels &holdfast:*"
	rights      = "Holdfast needs the rules " + aclRules + ", and " + aclPatterns
)

// permanent returns the refusal that an error amounts to: errors that no waiting mends. Other
// errors are returned as they are.
func permanent(node, key string, err error) error {
	if err == nil {
		return nil
	}
	var untrusted *tls.CertificateVerificationError
	if errors.As(err, &untrusted) {
		return refuse(node, "its TLS certificate is not trusted: "+oneLine(untrusted.Err.Error())+"; give the client the authority (CA) that signed it and the name that it is for")
	}
	var reply *ServerError
	if !errors.As(err, &reply) {
		return err
	}
	text := oneLine(reply.Error())
	switch reply.Code() {
	case "NOAUTH":
		return refuse(node, "wants a password, and the client gives none (NOAUTH)") // what Redis adds is for clients' authors
	case "WRONGPASS":
		return refuse(node, "refuses the credentials; give the client those that the server knows: "+text)
	case "NOPERM":
		return refuseRights(node, text)
	case "DENIED":
		return refuse(node, text+"; give it a password, or bind it to the interface that it is reached by")
	case "WRONGTYPE":
		return refused{&store.InvalidError{Field: "key", Value: key, Rule: "holds another kind of value on node " + node + "; a lock needs a key of its own"}}
	case "CROSSSLOT":
		return refused{clusterKeyError(key)}
	case "MAXTTL":
		return refuse(node, "has another MaxTTL: "+text)
	case "ERR":
		switch {
		case strings.Contains(text, "The user executing the script can't"): // Redis 7.0; later ones say NOPERM
			return refuseRights(node, text)
		case strings.Contains(text, "unknown command 'SENTINEL'"):
			return refuse(node, text+"; the address given for it is no Sentinel's (they listen on port 26379, if not told otherwise)")
		case strings.Contains(strings.ToLower(text), "unknown command"), strings.Contains(strings.ToLower(text), "unsupported command"):
			return refuse(node, text+"; Holdfast needs EVAL and EVALSHA, and unless TrustRestarts is set INFO and SCRIPT LOAD, which some proxies do not pass on")
		case strings.Contains(text, "DB index is out of range"):
			return refuse(node, "has no database of that number; choose one below its option databases, or 0")
		case strings.Contains(text, "AUTH") && strings.Contains(text, "without any password configured"):
			return refuse(node, "refuses the credentials; it has no password, so give the client none: "+text)
		}
	}
	return err
}

func refuseRights(node, text string) error {
	return refuse(node, text+"; "+rights)
}

// closedAtOnce adds to the error of a first contact what most often is behind it.
func closedAtOnce(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("%w; the connection was closed before anything was answered, as by a server that wants TLS or a client's certificate, or is in protected mode", err)
	}
	return err
}

// oneLine keeps an error of somebody else's to one line of bounded length.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > 500 {
		s = s[:497] + "..."
	}
	return s
}
