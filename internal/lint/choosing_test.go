package lint

import (
	"regexp"
	"strings"
	"testing"
)

const choosingDocument = "docs/choosing-a-store.md"

// TestChoosingIsTested shows that each test that docs/choosing-a-store.md names exists, and that
// each cell of its tables names one, or begins with a dash.
func TestChoosingIsTested(t *testing.T) {
	for _, n := range namedTests(t, choosingDocument) {
		n.check(t)
	}
	line := regexp.MustCompile(`(?m)^\|(.*)\|$`)
	separator := regexp.MustCompile(`^[|-]+$`)
	columns, head, cells := 0, true, 0
	for row := range strings.Lines(text(t, choosingDocument)) {
		m := line.FindStringSubmatch(strings.TrimSuffix(row, "\n"))
		switch {
		case m == nil:
			columns, head = 0, true
			continue
		case separator.MatchString(m[1]):
			head = false
			continue
		}
		row := strings.Split(m[1], "|")
		if columns == 0 {
			columns = len(row)
		}
		if len(row) != columns {
			t.Errorf("%s: a row has %d cells, not %d: %s", choosingDocument, len(row), columns, m[0])
		}
		for _, cell := range row[1:] {
			if cell = strings.TrimSpace(cell); !head && !namedPattern.MatchString(cell) && !strings.HasPrefix(cell, "–") {
				t.Errorf("%s: %s: names no test: %s", choosingDocument, strings.TrimSpace(row[0]), cell)
			}
			if !head {
				cells++
			}
		}
	}
	if cells < 100 {
		t.Errorf("found %d cells in %s: the pattern is wrong", cells, choosingDocument)
	}
}
