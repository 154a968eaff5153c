package httpfence

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/holdfast-go/holdfast/fence"
)

const (
	problemType = "application/problem+json"
	urn         = "urn:holdfast:"

	maxProblem = 64 << 10 // what ReadError reads of an answer
)

// problem is the body of a refusal, after RFC 9457. Tokens are strings, because the numbers of
// JSON are doubles to many readers.
type problem struct {
	Type     string `json:"type"`
	Title    string `json:"title"`
	Status   int    `json:"status"`
	Detail   string `json:"detail,omitempty"`
	Resource string `json:"resource,omitempty"`
	Token    string `json:"token,omitempty"`
	Seen     string `json:"seen,omitempty"`
	Field    string `json:"field,omitempty"`
}

// refusal is how one kind of error is told over HTTP. Details are fixed texts: what a resource
// said may tell of servers and accounts that are no business of the client.
type refusal struct {
	kind   error
	name   string // after the urn
	status int
	retry  bool // nothing was done, and the same request may succeed later
	detail string
}

var refusals = []refusal{
	{ErrMissing, "missing-token", http.StatusPreconditionRequired, false,
		"The resource is guarded: send the token of the lease in the header " + Header + "."},
	{fence.ErrBusy, "busy", http.StatusServiceUnavailable, true,
		"Others used the resource for longer than this request may wait. Nothing was done: try again."},
	{fence.ErrUnavailable, "unavailable", http.StatusServiceUnavailable, true,
		"What is needed to admit the request cannot be asked at present. Nothing was done: try again later."},
	{fence.ErrApplied, "applied", http.StatusConflict, false,
		"This token, or this step of it, was applied before. Nothing was done now."},
	{fence.ErrUnclaimed, "unclaimed", http.StatusConflict, false,
		"The guard has not seen this token: claim it before the first read."},
	{fence.ErrNoResource, "no-resource", http.StatusNotFound, false,
		"The guard knows no such resource."},
	{fence.ErrUncertain, "uncertain", http.StatusInternalServerError, false,
		"The request may have been carried out, or may yet be. Read the resource before anything else is done to it."},
	{fence.ErrInvalid, "invalid", http.StatusBadRequest, false, ""},
}

const staleName = "stale-token"

// kindOf returns how to tell err, nil where it is none of a guard's. The outermost [fence.Error]
// decides: what it wraps is only its reason.
func kindOf(err error) *refusal {
	var e *fence.Error
	if errors.As(err, &e) {
		err = e.Kind
	}
	for i := range refusals {
		if errors.Is(err, refusals[i].kind) {
			return &refusals[i]
		}
	}
	return nil
}

// WriteError answers a request with what a guard said, as problem+json (RFC 9457) whose type
// begins with urn:holdfast: and which names the resource and, where the token is stale, the
// token that was shown and the one that was seen. It reports false, and writes nothing, where
// err is none of package fence's or this package's. The statuses are
//
//	412  stale-token    fence.ErrStale; final, clients must not try again
//	428  missing-token  ErrMissing
//	400  invalid        fence.ErrInvalid, of the token or the resource; 500 of anything else
//	404  no-resource    fence.ErrNoResource
//	409  applied        fence.ErrApplied
//	409  unclaimed      fence.ErrUnclaimed
//	503  busy           fence.ErrBusy, with Retry-After
//	503  unavailable    fence.ErrUnavailable, with Retry-After
//	500  uncertain      fence.ErrUncertain
//
// Of the reason that an error wraps the client learns nothing.
func WriteError(w http.ResponseWriter, err error) bool {
	var stale *fence.StaleError
	if errors.As(err, &stale) {
		write(w, problem{
			Type: urn + staleName, Title: fence.ErrStale.Error(), Status: http.StatusPreconditionFailed,
			Detail:   "Another has been granted the lock since. Nothing was done, and no retry will help.",
			Resource: stale.Resource, Token: stale.Token.String(), Seen: stale.Seen.String(),
		})
		return true
	}
	k := kindOf(err)
	if k == nil {
		return false
	}
	p := k.problem(resourceOf(err))
	var invalid *fence.InvalidError
	if k.kind == fence.ErrInvalid {
		p.Detail = "The guard's resource or configuration breaks a rule."
		if !errors.As(err, &invalid) || invalid.Field != "token" && invalid.Field != "resource" {
			p.Status = http.StatusInternalServerError // not what the client sent
		} else {
			p.Field, p.Detail = invalid.Field, invalid.Error()
		}
	}
	if unknown := unknownOf(err); unknown != nil {
		p.Detail = fmt.Sprintf("The resource has no mark here, and marks may have been lost. It is refused for %v more, "+
			"so that no former holder gets in. Nothing was done.", unknown.wait())
	}
	if k.retry {
		w.Header().Set("Retry-After", strconv.Itoa(int(retryIn(err)/time.Second)))
	}
	write(w, p)
	return true
}

func (k *refusal) problem(resource string) problem {
	return problem{Type: urn + k.name, Title: k.kind.Error(), Status: k.status, Detail: k.detail, Resource: resource}
}

func resourceOf(err error) string {
	var e *fence.Error
	if errors.As(err, &e) {
		return e.Resource
	}
	return ""
}

// unknownOf returns the refusal of a resource without a mark that err is, or nil.
func unknownOf(err error) *unknownError {
	var unknown *unknownError
	errors.As(err, &unknown)
	return unknown
}

// retryIn is in whole seconds.
func retryIn(err error) time.Duration {
	if unknown := unknownOf(err); unknown != nil {
		return unknown.wait()
	}
	return retryAfter
}

func write(w http.ResponseWriter, p problem) {
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // strings and a number
	}
	h := w.Header()
	h.Del("Content-Length")
	h.Del("Content-Encoding")
	h.Set("Content-Type", problemType)
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	w.Write(append(body, '\n'))
}

// refuse is WriteError for errors of any kind: a request that did not enter must not look as if
// it had.
func refuse(w http.ResponseWriter, err error) {
	if !WriteError(w, err) {
		WriteError(w, &fence.Error{Kind: fence.ErrUnavailable, Err: err})
	}
}

// ReadError returns the error that [WriteError] or a [Gateway] wrote into a response: a
// [*fence.StaleError], [*fence.InvalidError] or [*fence.Error], whose resource is the one that
// the service named. It is nil where the response is somebody else's, whatever the status:
// a 412 of the service itself says nothing about a token. At most 64 KiB of the body are read,
// and the body can be read from its beginning afterwards.
func ReadError(resp *http.Response) error {
	if resp.StatusCode < 400 || resp.Body == nil {
		return nil
	}
	if media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || media != problemType {
		return nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	resp.Body = &replayed{io.MultiReader(bytes.NewReader(body), resp.Body), resp.Body}
	var p problem
	if err != nil || json.Unmarshal(body, &p) != nil {
		return nil
	}
	return p.err(resp.StatusCode)
}

// oneLine leaves out what the text of an error must not hold.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }), " ")
}

// replayed is a body of which a part is read once more.
type replayed struct {
	io.Reader
	io.Closer
}

// err is nil where the problem is none of ours.
func (p *problem) err(status int) error {
	p.Field, p.Detail = oneLine(p.Field), oneLine(p.Detail)
	if p.Type == urn+staleName {
		token, err := fence.ParseToken(p.Token)
		seen, err2 := fence.ParseToken(p.Seen)
		if err != nil || err2 != nil || token >= seen || status != http.StatusPreconditionFailed {
			return nil
		}
		return &fence.StaleError{Resource: p.Resource, Token: token, Seen: seen}
	}
	for i := range refusals {
		k := &refusals[i]
		switch {
		case p.Type != urn+k.name:
		case k.kind == fence.ErrInvalid:
			return &fence.InvalidError{Field: p.Field, Rule: p.Detail}
		default:
			return &fence.Error{Kind: k.kind, Resource: p.Resource, Err: errors.New(p.Detail)}
		}
	}
	return nil
}
