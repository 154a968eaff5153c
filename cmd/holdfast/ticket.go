package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/pflag"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/store"
)

const ticketVariable = "HOLDFAST_TICKET"

// ticketHelp is the part of the help that the verbs with a ticket share.
const ticketHelp = `TICKET is what acquire, or the last extend, printed. It is a secret: whoever has it can
extend and release the lease. As an argument it stands in the list of processes, for every
user of the machine to see. It need not:
  holdfast VERB -                    reads it from the standard input
  holdfast VERB --ticket-file FILE   reads it from a file
  HOLDFAST_TICKET=... holdfast VERB  reads it from the environment
The store is the one of acquire: give the same --store, or HOLDFAST_STORE. A ticket works
on the machine that printed it, until that boots again. Tickets need Linux's boot clock: on
other systems use holdfast run, and so with ZooKeeper, whose leases end with the process.`

// checkTickets refuses a system that has no tickets, before anything is waited for: they need
// a clock that all processes share, that counts sleep, and that nobody can set.
func checkTickets(system string) error {
	if system == "linux" {
		return nil
	}
	return &exit{exitFailed, fmt.Errorf("%w: there are no tickets on this system; use holdfast run", store.ErrUnsupported)}
}

// answerLimit bounds how long we wait for a store that is asked once.
const answerLimit = 10 * time.Second

// ticketFlags say where a ticket comes from, and where the new one goes.
type ticketFlags struct {
	file string
	json bool
}

func (f *ticketFlags) addFile(flags *pflag.FlagSet, text string) {
	flags.StringVar(&f.file, "ticket-file", "", text)
}

// check refuses the empty name of an unset variable: what is secret would go elsewhere.
func (f *ticketFlags) check(given func(flag string) bool) error {
	if given("ticket-file") && f.file == "" {
		return usage("invalid --ticket-file: must not be empty")
	}
	return nil
}

func (f *ticketFlags) addJSON(flags *pflag.FlagSet) {
	flags.BoolVar(&f.json, "json", false, "print a JSON object with key, token, owner, deadline and ticket")
}

// maxTicket is more than any ticket has.
const maxTicket = 64 << 10

// read returns the ticket of the command line: the argument, "-" for stdin, the file, or
// the environment. What is no ticket is refused with an [*store.InvalidError] that does not
// repeat it.
func (f *ticketFlags) read(args []string, stdin io.Reader) (text string, t store.Ticket, err error) {
	switch env, set := os.LookupEnv(ticketVariable); {
	case len(args) > 0 && f.file != "":
		return "", t, usage("TICKET and --ticket-file exclude each other")
	case len(args) > 0 && args[0] == "-":
		text, err = readTicket(stdin)
	case len(args) > 0:
		text = args[0]
	case f.file != "":
		text, err = readTicketFile(f.file)
	case set:
		text = env
	default:
		return "", t, usage("TICKET is missing: give it by --ticket-file or %s, as - on the standard input, or as an argument", ticketVariable)
	}
	if err != nil {
		return "", t, err
	}
	if strings.TrimSpace(text) == "" {
		return "", t, failure(&store.InvalidError{Field: "ticket", Rule: "is empty: did acquire fail?"})
	}
	t, err = store.ParseTicket(text)
	if err != nil {
		return "", t, failure(err)
	}
	return text, t, nil
}

func readTicket(from io.Reader) (string, error) {
	text, err := io.ReadAll(io.LimitReader(from, maxTicket+1))
	switch {
	case err != nil:
		return "", &exit{exitFailed, fmt.Errorf("the ticket cannot be read: %w", err)}
	case len(text) > maxTicket:
		return "", failure(&store.InvalidError{Field: "ticket", Rule: fmt.Sprintf("has more than %d bytes", maxTicket)})
	}
	return string(text), nil
}

func readTicketFile(name string) (string, error) {
	if err := checkTicketFile(name); err != nil {
		return "", err
	}
	file, err := os.Open(name)
	if err != nil {
		return "", &exit{exitFailed, fmt.Errorf("the ticket cannot be read: %w", err)}
	}
	defer file.Close()
	return readTicket(file)
}

// checkTicketFile refuses what must not be replaced, such as a device or a link.
func checkTicketFile(name string) error {
	if info, err := os.Lstat(name); err == nil && !info.Mode().IsRegular() {
		return failure(&store.InvalidError{Field: "--ticket-file", Value: name, Rule: "must be a regular file"})
	}
	return nil
}

// checkUnused refuses a file that must not be replaced by a ticket of key in st: it holds
// something else, or a ticket of another lease, which may hold still. One of the same key is of
// no use once key is acquired, nor is one that was written longer ago than its ttl.
func (f *ticketFlags) checkUnused(st store.Store, key string) error {
	if f.file == "" {
		return nil
	}
	refuse := func(rule string) error {
		return failure(&store.InvalidError{Field: "--ticket-file", Value: f.file, Rule: rule})
	}
	info, err := os.Stat(f.file)
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.Size() == 0 {
		return nil
	}
	text, err := readTicketFile(f.file)
	switch {
	case errors.Is(err, fs.ErrNotExist): // released meanwhile
		return nil
	case err != nil:
		return err
	}
	t, err := store.ParseTicket(text)
	switch {
	case strings.TrimSpace(text) == "":
	case err != nil:
		return refuse("holds something else than a ticket; remove it, or name another file")
	case string(t.Key) == key && t.Store == st.Info().Fingerprint:
	case info != nil && time.Since(info.ModTime()) > t.TTL:
	default:
		return refuse("holds a ticket of another lease; release it first, or remove the file")
	}
	return nil
}

// owner is that of the ticket in the file: a ticket of a later lease may have come there.
func (f *ticketFlags) owner() (string, error) {
	text, err := readTicketFile(f.file)
	if err != nil {
		return "", err
	}
	t, err := store.ParseTicket(text)
	return t.Owner, err
}

// writeTicketFile replaces the file as a whole, for its owner only: a reader has the old
// ticket or the new one.
func writeTicketFile(name, ticket string) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(name), ".holdfast-ticket-*") // has mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	_, err = io.WriteString(tmp, ticket+"\n")
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), name)
	}
	return err
}

// leaseJSON is a lease as --json prints it.
type leaseJSON struct {
	keyJSON
	Token    int64   `json:"token"`
	Owner    string  `json:"owner"`
	Deadline float64 `json:"deadline"`         // Unix time in seconds
	Ticket   string  `json:"ticket,omitempty"` // not where it goes to a file
}

// keyJSON is a key in JSON, whose strings hold no bytes that are not UTF-8.
type keyJSON struct {
	Key   string `json:"key"`
	Bytes []byte `json:"key_base64,omitempty"` // the key, where it is not UTF-8
}

func jsonKey(key string) keyJSON {
	if utf8.ValidString(key) {
		return keyJSON{Key: key}
	}
	return keyJSON{Key: key, Bytes: []byte(key)}
}

// hand writes the lease down and gives it to the caller: to the file, if there is one, and
// else to stdout. The ticket is returned also where it could not be given.
func (f *ticketFlags) hand(lease *holdfast.Lease) (ticket string, err error) {
	w := leaseJSON{jsonKey(lease.Key()), int64(lease.Token()), lease.Owner(), deadline(lease), ""}
	ticket, err = lease.Ticket()
	if err != nil {
		return "", err
	}
	if f.file != "" {
		err = writeTicketFile(f.file, ticket)
	} else {
		w.Ticket = ticket
	}
	switch {
	case err != nil:
	case f.json:
		err = printJSON(w)
	case f.file == "":
		err = printText(ticket + "\n")
	}
	if err != nil {
		err = fmt.Errorf("the ticket cannot be written: %w", err)
	}
	return ticket, err
}

// adoptPause is between two attempts to adopt.
const adoptPause = 100 * time.Millisecond

// adopt takes over the lease of a ticket, and extends it thereby. A store that does not
// answer is asked again, for a while and as long as the ticket is good. Errors are those of the verb.
func adopt(ctx context.Context, locks *holdfast.Locker, verb, ticket string) (*holdfast.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	try := func() (*holdfast.Lease, error) {
		lease, err := locks.Adopt(ctx, ticket)
		if e, ok := err.(*holdfast.Error); ok {
			told := *e
			told.Op = verb // nobody has asked to adopt
			err = &told
		}
		return lease, err
	}
	lease, err := try()
	var last error // of the attempts before
	for unanswered(err) && ctx.Err() == nil {
		last = err
		select {
		case <-ctx.Done():
		case <-time.After(adoptPause):
			lease, err = try()
		}
		if ctx.Err() != nil && err != nil { // that the time is up says less than why
			err = last
		}
	}
	invalid, _ := errors.AsType[*store.InvalidError](err)
	switch {
	case err == nil:
		return lease, nil
	case errors.Is(err, holdfast.ErrLost) && last != nil: // the ttl may have ended meanwhile
		if e, ok := errors.AsType[*holdfast.Error](last); ok {
			last = e.Err
		}
		return nil, lost(fmt.Errorf("%w; before that: %w", err, last))
	case errors.Is(err, holdfast.ErrLost):
		return nil, lost(err)
	case invalid != nil && invalid.Field == "ticket":
		return nil, &exit{exitUsage, fmt.Errorf("%w; --store and %s must be as they were for acquire", err, storeVariable)}
	case unanswered(err):
		return nil, &exit{exitFailed, fmt.Errorf("%w; the ticket stays good until its ttl ends: try again", err)}
	}
	return nil, refusal(err)
}

// unanswered reports whether asking again may bring an answer.
func unanswered(err error) bool {
	return !errors.Is(err, holdfast.ErrLost) && (errors.Is(err, holdfast.ErrUnavailable) || errors.Is(err, holdfast.ErrUncertain))
}

// lost is the end of a verb whose lease is lost.
func lost(err error) error {
	return &exit{exitLost, fmt.Errorf("%w; what it protected may be another's: stop the work, and acquire anew", err)}
}

// printText writes to stdout.
func printText(text string) error {
	_, err := io.WriteString(os.Stdout, text)
	return err
}

// printJSON writes v to stdout, as one line.
func printJSON(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return printText(string(text) + "\n")
}
