package lint

import (
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const modelsDocument = "models/README.md"

var (
	// modelRun is a line of the table in models/run: name, model, expectation, options.
	modelRun = regexp.MustCompile(`(?m)^(?:fast|all)\|([\w-]+)\|(\w+)\|(\w+)\|([^|\n]*)\|[^|\n]+$`)
	// codeLine is a line of code that the document names by its file and its text.
	codeLine = regexp.MustCompile("`([\\w./]+\\.(?:go|lua)): ([^`]+)`")
	// ruleRow is a row of the table of rules: its letter, the code, the runs and the test.
	ruleRow = regexp.MustCompile(`(?m)^\| ([A-Z]) [^|]* \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$`)
	runName = regexp.MustCompile("`([A-Za-z][\\w]*-[\\w-]+)`")
	mutant  = regexp.MustCompile(`MUT_\w+`)
)

// TestModelsMapTheCode shows that each rule of the protocol has its lines of code, its test, and a
// run of a model or the reason why there is none, and that all of these exist.
func TestModelsMapTheCode(t *testing.T) {
	document := text(t, modelsDocument)
	for _, n := range namedTests(t, modelsDocument) {
		n.check(t)
	}
	lines := codeLine.FindAllStringSubmatch(document, -1)
	if len(lines) < 30 {
		t.Fatalf("found %d lines of code in %s: the pattern is wrong", len(lines), modelsDocument)
	}
	for _, m := range lines {
		switch file, line := m[1], m[2]; {
		case !exists(file):
			t.Errorf("%s names %s, which does not exist", modelsDocument, file)
		case line != strings.TrimSpace(line):
			t.Errorf("%s names %q of %s with space around", modelsDocument, line, file)
		default:
			if n := strings.Count(text(t, file), line); n != 1 {
				t.Errorf("%s names a line that %s has %d times: %s", modelsDocument, file, n, line)
			}
		}
	}
	rules := map[string]bool{}
	for _, row := range ruleRow.FindAllStringSubmatch(document, -1) {
		letter, code, caught, test := row[1], row[2], row[3], row[4]
		rules[letter] = true
		if !codeLine.MatchString(code) {
			t.Errorf("%s names no code for rule %s", modelsDocument, letter)
		}
		if !strings.HasPrefix(caught, "`"+letter+"-") && !strings.HasPrefix(caught, "no model: ") {
			t.Errorf("%s: rule %s begins neither with a run of its own nor with why there is no model: %s", modelsDocument, letter, caught)
		}
		if !strings.Contains(test, "` "+letter) {
			t.Errorf("%s names no test for rule %s", modelsDocument, letter)
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^\| ([A-Z]) `).FindAllStringSubmatch(text(t, "docs/protocol.md"), -1) {
		if !rules[m[1]] {
			t.Errorf("%s has no row for rule %s", modelsDocument, m[1])
		}
		delete(rules, m[1])
	}
	for letter := range rules {
		t.Errorf("%s has a row for rule %s, which docs/protocol.md does not have", modelsDocument, letter)
	}
}

// TestMutantsAreRun shows that each mutant of a model is run, that each run of one is in the
// document, and that the document names no other.
func TestMutantsAreRun(t *testing.T) {
	document := text(t, modelsDocument)
	runs := map[string]bool{}
	ran := map[string]bool{} // mutants, by model
	for _, m := range modelRun.FindAllStringSubmatch(text(t, "models/run"), -1) {
		name, model, expected, options := m[1], m[2], m[3], m[4]
		if runs[name] {
			t.Errorf("models/run has two runs named %s", name)
		}
		runs[name] = true
		for _, mut := range mutant.FindAllString(options, -1) {
			ran[model+" "+mut] = true
		}
		if (expected != "holds" || mutant.MatchString(options)) && !strings.Contains(document, "`"+name+"`") {
			t.Errorf("%s does not name %s", modelsDocument, name)
		}
	}
	if len(runs) < 50 {
		t.Fatalf("found %d runs in models/run: the pattern is wrong", len(runs))
	}
	for _, m := range runName.FindAllStringSubmatch(document, -1) {
		if !runs[m[1]] {
			t.Errorf("%s names %s, which models/run does not have", modelsDocument, m[1])
		}
	}
	files, err := filepath.Glob(filepath.Join(root, "models/*.pml"))
	if err != nil || len(files) < 4 {
		t.Fatalf("found %d models: %v", len(files), err)
	}
	has := map[string]bool{}
	for _, file := range files {
		model := filepath.Base(file)
		for _, line := range strings.Split(text(t, "models/"+model), "\n") {
			if strings.HasPrefix(line, "#") {
				for _, mut := range mutant.FindAllString(line, -1) {
					has[strings.TrimSuffix(model, ".pml")+" "+mut] = true
				}
			}
		}
	}
	for _, mut := range slices.Sorted(maps.Keys(has)) {
		if !ran[mut] {
			t.Errorf("models/run does not run the mutant: %s", mut)
		}
	}
	for _, mut := range slices.Sorted(maps.Keys(ran)) {
		if !has[mut] {
			t.Errorf("models/run runs a mutant that the model does not have: %s", mut)
		}
	}
}
