package rules

import (
	"debug/buildinfo"
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	tag     = "holdfast_rules"
	library = "github.com/holdfast-go/holdfast/redlock"
	command = "github.com/holdfast-go/holdfast/cmd/holdfast"
)

// TestCommandIsFree shows that a build without the tag has no switches: not in its list of
// files, not among its symbols, not in its settings. A build with the tag is found out by each
// of these checks.
func TestCommandIsFree(t *testing.T) {
	switches := declared(t, "rules_on.go")
	for _, name := range declared(t, "rules_off.go") {
		switches = slices.DeleteFunc(switches, func(s string) bool { return s == name })
	}
	if !slices.Contains(switches, "SwitchOff") || !slices.Contains(switches, "MoveWallClock") {
		t.Fatalf("rules_on.go declares %q only", switches)
	}
	dir := t.TempDir()
	for _, c := range []struct {
		name  string
		flags []string
		free  bool
	}{
		{"default", nil, true},
		{"tagged", []string{"-tags", tag}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := goTool(t, slices.Concat([]string{"list", "-f", `{{join .GoFiles " "}}`}, c.flags, []string{library})...)
			listed := slices.Contains(strings.Fields(files), "rules_on.go")
			binary := filepath.Join(dir, c.name+".exe")
			goTool(t, slices.Concat([]string{"build", "-o", binary}, c.flags, []string{command})...)
			symbols := found(t, binary, switches)
			settings := built(t, binary)
			t.Logf("rules_on.go listed: %v; symbols: %q; build settings: %q", listed, symbols, settings)
			for what, has := range map[string]bool{
				"its list of files": listed,
				"its symbols":       len(symbols) > 0,
				"its settings":      strings.Contains(settings, tag),
			} {
				if has == c.free {
					t.Errorf("the switches are in %s: %v, want %v", what, has, !c.free)
				}
			}
		})
	}
}

// declared names what a file of the library declares.
func declared(t *testing.T, file string) []string {
	t.Helper()
	dir := strings.TrimSpace(goTool(t, "list", "-f", "{{.Dir}}", library))
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, file), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			names = append(names, d.Name.Name)
		case *ast.GenDecl:
			for _, s := range d.Specs {
				if v, ok := s.(*ast.ValueSpec); ok {
					for _, n := range v.Names {
						names = append(names, n.Name)
					}
				}
			}
		}
	}
	return names
}

// found answers which of the library's names are symbols of a binary. The linker leaves out
// what nothing uses.
func found(t *testing.T, binary string, names []string) []string {
	t.Helper()
	var symbols []string
	known := 0
	for line := range strings.Lines(goTool(t, "tool", "nm", binary)) {
		fields := strings.Fields(line)
		name, of := strings.CutPrefix(fields[len(fields)-1], library+".")
		if !of {
			continue
		}
		known++
		if slices.Contains(names, name) {
			symbols = append(symbols, name)
		}
	}
	if known < 10 {
		t.Fatalf("the command has only %d symbols of %s: nothing can be said", known, library)
	}
	return symbols
}

// built is with which tags a binary was built.
func built(t *testing.T, binary string) string {
	t.Helper()
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range info.Settings {
		if s.Key == "-tags" {
			return s.Value
		}
	}
	return ""
}

// goTool runs the go command, without the flags that the environment may have for it.
func goTool(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Env = append(cmd.Environ(), "GOFLAGS=")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return string(out)
}
