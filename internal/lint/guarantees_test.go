package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestGuaranteesAreTested shows that each test that GUARANTEES.md names exists, that each
// rule it lists has a scenario, and that `make test` builds with the tags that they need.
func TestGuaranteesAreTested(t *testing.T) {
	makefile := text(t, "Makefile")
	scenarios := text(t, "conformance/rules/rules_test.go")
	named := regexp.MustCompile("`([a-z]+)\\.(Test\\w+)`((?: [A-Z]\\b)*)").FindAllStringSubmatch(text(t, "GUARANTEES.md"), -1)
	if len(named) < 10 {
		t.Fatalf("found %d tests in GUARANTEES.md: the pattern is wrong", len(named))
	}
	for _, n := range named {
		file := declaring(t, directoryOf(n[1]), n[2])
		if file == "" {
			t.Errorf("GUARANTEES.md names %s.%s, which is not in %s", n[1], n[2], directoryOf(n[1]))
			continue
		}
		tag := regexp.MustCompile(`(?m)^//go:build (holdfast_\w+)$`).FindStringSubmatch(text(t, file))
		if tag != nil && !strings.Contains(makefile, "-tags "+tag[1]) {
			t.Errorf("%s needs the tag %s, which the Makefile never sets", file, tag[1])
		}
		for _, rule := range strings.Fields(n[3]) {
			if !strings.Contains(scenarios, "\t{\""+rule+"\", ") {
				t.Errorf("GUARANTEES.md says that %s shows rule %s, which has no scenario", n[2], rule)
			}
		}
	}
}

// directoryOf returns where the tests of a package lie, by the name that GUARANTEES.md has
// for it.
func directoryOf(name string) string {
	switch name {
	case "holdfast":
		return "."
	case "cmd":
		return "cmd/holdfast"
	}
	return "conformance/" + name
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
		if strings.Contains(text(t, name), "\nfunc "+test+"(t *testing.T) {") {
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
