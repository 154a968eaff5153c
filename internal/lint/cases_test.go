package lint

import (
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const casesDocument = "docs/cases.md"

// caseRow is a row of docs/cases.md about one case: its id, and its last column, which names
// tests or says why the case does not apply.
var caseRow = regexp.MustCompile(`(?m)^\| ([A-Z]{3}-\d\d|R\d+|class \d+) \|.*\| ([^|]*) \|$`)

// TestCasesAreTested shows that each test that docs/cases.md names exists, and that each of
// its cases names one, or says why it does not apply.
func TestCasesAreTested(t *testing.T) {
	for _, n := range namedTests(t, casesDocument) {
		n.check(t)
	}
	rows := caseRow.FindAllStringSubmatch(text(t, casesDocument), -1)
	if len(rows) < 50 {
		t.Fatalf("found %d cases in %s: the pattern is wrong", len(rows), casesDocument)
	}
	seen := map[string]bool{}
	for _, row := range rows {
		id, shown := row[1], row[2]
		if seen[id] {
			t.Errorf("%s lists %s twice", casesDocument, id)
		}
		seen[id] = true
		if !namedPattern.MatchString(shown) && !strings.HasPrefix(shown, "Does not apply: ") {
			t.Errorf("%s: %s names no test, and does not say why it does not apply", casesDocument, id)
		}
	}
	for line := range strings.Lines(text(t, casesDocument)) {
		if strings.HasPrefix(line, "| ") && !caseRow.MatchString(strings.TrimSuffix(line, "\n")) && !strings.HasPrefix(line, "| case |") {
			t.Errorf("%s has a row that is none of a case: %s", casesDocument, line)
		}
	}
}

// TestCasesAreListed shows that each case that a test mentions is in docs/cases.md.
func TestCasesAreListed(t *testing.T) {
	listed := map[string]bool{}
	for _, row := range caseRow.FindAllStringSubmatch(text(t, casesDocument), -1) {
		listed[row[1]] = true
	}
	mention := regexp.MustCompile(`\b(?:[A-Z]{3}-\d\d|R\d{1,2}|[Cc]lass(?:es)? \d+(?:,? (?:and )?\d+)*)\b`)
	number := regexp.MustCompile(`\d+`)
	mentions := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && strings.HasPrefix(d.Name(), "."):
			return fs.SkipDir
		case !strings.HasSuffix(path, "_test.go") && !strings.HasSuffix(path, ".txtar"):
			return nil
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		for line := range strings.Lines(text(t, name)) {
			_, comment, _ := strings.Cut(line, "//")
			if strings.HasSuffix(path, ".txtar") {
				_, comment, _ = strings.Cut(line, "#")
			}
			for _, m := range mention.FindAllString(comment, -1) {
				ids := []string{m}
				if strings.HasPrefix(strings.ToLower(m), "class") {
					ids = nil
					for _, n := range number.FindAllString(m, -1) {
						ids = append(ids, "class "+n)
					}
				}
				for _, id := range ids {
					if mentions++; !listed[id] && !strings.HasPrefix(id, "UTF-") {
						t.Errorf("%s mentions %s, which %s does not list", name, id, casesDocument)
					}
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if mentions < 50 {
		t.Errorf("found %d mentions of cases in tests: the pattern is wrong", mentions)
	}
}
