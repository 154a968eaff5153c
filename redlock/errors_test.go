package redlock

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/store"
)

// The rules that people are told to add are all that the scripts need.
func TestRulesCoverScripts(t *testing.T) {
	rules := strings.Fields(aclRules)
	call := regexp.MustCompile(`call\('([A-Z]+)'`)
	names, err := fs.Glob(os.DirFS("."), "*.lua")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		calls := call.FindAllSubmatch(text, -1)
		for _, c := range calls {
			rule := "+" + strings.ToLower(string(c[1]))
			if !slices.ContainsFunc(rules, func(r string) bool { r, _, _ = strings.Cut(r, "|"); return r == rule }) {
				t.Errorf("%s calls %s, which aclRules does not name", name, c[1])
			}
		}
		if n := strings.Count(string(text), "call("); n != len(calls) {
			t.Errorf("%s has %d calls, of which %d were understood", name, n, len(calls))
		}
	}
}

// What no waiting mends is refused with what to do; everything else stays what it was.
func TestPermanent(t *testing.T) {
	for _, c := range []struct {
		err   error
		field string // of the refusal; empty: it is none
		says  string
	}{
		{&ServerError{"NOAUTH Authentication required."}, "node", "wants a password, and the client gives none"},
		{&ServerError{"WRONGPASS invalid username-password pair"}, "node", "refuses the credentials; give the client those"},
		{&ServerError{"ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?"}, "node", "refuses the credentials; it has no password"},
		{&ServerError{"NOPERM this user has no permissions to run the 'info' command"}, "node", "+info"},
		{&ServerError{"ERR The user executing the script can't run this command or subcommand script: 7, on @user_script:1."}, "node", "+time"},
		{&ServerError{"ERR The user executing the script can't access at least one of the keys mentioned in the command arguments"}, "node", "{KEY}:*"},
		{&ServerError{"DENIED Redis is running in protected mode"}, "node", "password"},
		{&ServerError{"ERR DB index is out of range"}, "node", "databases"},
		{&ServerError{"ERR unknown command 'AUTH', with args beginning with: 'bob' 'hunter2' "}, "node", "unknown command 'AUTH'; Holdfast"},
		{&ServerError{"ERR unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `bob`, `hunter2`, "}, "node", "unknown command `HELLO`; Holdfast"},
		{&ServerError{"WRONGTYPE Operation against a key"}, "key", "a key of its own"},
		{fmt.Errorf("dial: %w", &tls.CertificateVerificationError{Err: x509.HostnameError{Host: "h", Certificate: &x509.Certificate{DNSNames: []string{"x"}}}}), "node", "CA"},
		{&ServerError{"ERR max number of clients reached"}, "", ""},
		{&ServerError{"OOM command not allowed when used memory > 'maxmemory'."}, "", ""},
		{&ServerError{"MISCONF Redis is configured to save RDB snapshots"}, "", ""},
		{&ServerError{"READONLY You can't write against a read only replica."}, "", ""},
		{&ServerError{"LOADING Redis is loading the dataset in memory"}, "", ""},
		{&ServerError{"BUSY Redis is busy running a script."}, "", ""},
		{&ServerError{"CLUSTERDOWN The cluster is down"}, "", ""},
		{&ServerError{"TRYAGAIN Multiple keys request during rehashing of slot"}, "", ""},
		{&ServerError{"NOREPLICAS Not enough good replicas to write."}, "", ""},
		{io.EOF, "", ""},
	} {
		err := permanent("n", "k", c.err)
		var invalid *store.InvalidError
		if !errors.As(err, &invalid) {
			if c.field != "" || err != c.err {
				t.Errorf("%v: %v, want it refused: %t", c.err, err, c.field != "")
			}
			continue
		}
		if invalid.Field != c.field || !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v: %v", c.err, err)
		}
	}
}
