package sqlfence

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/fence"
)

// unquote reads a quoted name as a database does, up to the closing mark, and returns what
// follows it.
func unquote(t *testing.T, d Dialect, s string) (name, rest string) {
	t.Helper()
	mark := byte('`')
	if d == PostgreSQL {
		mark = '"'
	}
	if s == "" || s[0] != mark {
		t.Fatalf("%q does not begin with %c", s, mark)
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] != mark:
			b.WriteByte(s[i])
		case i+1 < len(s) && s[i+1] == mark:
			b.WriteByte(mark)
			i++
		default:
			return b.String(), s[i+1:]
		}
	}
	t.Fatalf("%q has no end", s)
	return "", ""
}

func FuzzIdentifier(f *testing.F) {
	for _, name := range []string{"", "t", "a.b", "a.b.c", ".", "a.", `"`, "`", `a"."b`, "a`; DROP TABLE t; --", "\x00", "\xff", "ü",
		`\`, "'", "a b ", "select", strings.Repeat("x", 63), strings.Repeat("x", 64), strings.Repeat("x", 65), strings.Repeat("ü", 32)} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		for _, d := range []Dialect{PostgreSQL, MySQL, SQLite} {
			q, err := d.quote("column", name)
			limit := 64
			if d == PostgreSQL {
				limit = 63
			}
			good := name != "" && len(name) <= limit && !strings.Contains(name, "\x00") && utf8.ValidString(name) &&
				!(d == MySQL && strings.HasSuffix(name, " "))
			if good != (err == nil) || err != nil && !errors.Is(err, fence.ErrInvalid) {
				t.Fatalf("%v: quote(%q) = %q, %v", d, name, q, err)
			}
			if err == nil {
				if got, rest := unquote(t, d, q); got != name || rest != "" {
					t.Errorf("%v: quote(%q) = %q, which is %q and %q", d, name, q, got, rest)
				}
			} else if strings.ContainsAny(err.Error(), "\n\x00") {
				t.Errorf("%q is not one line", err)
			}
			table, err := d.table(name)
			if err != nil {
				continue
			}
			first, rest := unquote(t, d, table.quoted)
			if rest != "" {
				second, end := unquote(t, d, strings.TrimPrefix(rest, "."))
				first += "." + second
				if rest[0] != '.' || end != "" || table.schema == "" {
					t.Errorf("%v: table(%q) = %q", d, name, table.quoted)
				}
			}
			if first != name {
				t.Errorf("%v: table(%q) = %q, which is %q", d, name, table.quoted, first)
			}
		}
	})
}
