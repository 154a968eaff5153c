package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestGuaranteesAreTested shows that each test that GUARANTEES.md names exists, that each
// rule it lists has a scenario, and that `make test` builds with the tags that they need.
func TestGuaranteesAreTested(t *testing.T) {
	scenarios := text(t, "conformance/rules/rules_test.go")
	for _, n := range namedTests(t, "GUARANTEES.md") {
		n.check(t)
		for _, rule := range n.rules {
			if !strings.Contains(scenarios, "\t{\""+rule+"\", ") {
				t.Errorf("GUARANTEES.md says that %s shows rule %s, which has no scenario", n.test, rule)
			}
		}
	}
}

// named is a test that a document names as `package.TestName`, a script of the command's as
// `cmd.TestScripts/name`. Letters behind it are rules of the protocol.
type named struct {
	document, pkg, test, script string
	rules                       []string
}

var namedPattern = regexp.MustCompile("`([a-z]+)\\.((?:Test|Fuzz|Benchmark)\\w+)(?:/(\\w+))?`((?: [A-Z]\\b)*)")

// namedTests returns the tests that a document names.
func namedTests(t *testing.T, document string) (all []named) {
	t.Helper()
	for _, m := range namedPattern.FindAllStringSubmatch(text(t, document), -1) {
		all = append(all, named{document, m[1], m[2], m[3], strings.Fields(m[4])})
	}
	if len(all) < 10 {
		t.Fatalf("found %d tests in %s: the pattern is wrong", len(all), document)
	}
	return all
}

// check complains where the test does not exist, or needs a build tag that `make test` does
// not set.
func (n named) check(t *testing.T) {
	t.Helper()
	dir := directoryOf(n.pkg)
	file := declaring(t, dir, n.test)
	if file == "" {
		t.Errorf("%s names %s.%s, which is not in %s", n.document, n.pkg, n.test, dir)
		return
	}
	tag := regexp.MustCompile(`(?m)^//go:build (holdfast_\w+)$`).FindStringSubmatch(text(t, file))
	if tag != nil && !strings.Contains(text(t, "Makefile"), "-tags "+tag[1]) {
		t.Errorf("%s needs the tag %s, which the Makefile never sets", file, tag[1])
	}
	if n.script != "" && !exists(filepath.Join(dir, "testdata/script", n.script+".txtar")) {
		t.Errorf("%s names the script %s, which %s does not have", n.document, n.script, dir)
	}
}

// directoryOf returns where the tests of a package lie, by the name that documents have for
// it: the last part of its path. One in conformance/ comes first.
func directoryOf(name string) string {
	switch name {
	case "holdfast":
		return "."
	case "cmd":
		return "cmd/holdfast"
	}
	dirs := []string{"conformance/" + name, name, "store/" + name, "redlock/" + name, "fence/" + name, "examples/" + name}
	return dirs[max(0, slices.IndexFunc(dirs, exists))]
}

func exists(name string) bool {
	_, err := os.Stat(filepath.Join(root, name))
	return err == nil
}

// declaring returns the file of dir that declares a test, "" where none does.
func declaring(t *testing.T, dir, test string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name, err := filepath.Rel(root, file)
		if err != nil {
			t.Fatal(err)
		}
		if regexp.MustCompile(`(?m)^func ` + test + `\(\w+ \*testing\.[TFB]\) +\{`).MatchString(text(t, name)) {
			return name
		}
	}
	return ""
}

func text(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
