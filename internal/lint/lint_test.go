package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	root     = "../.."
	mainPath = "github.com/holdfast-go/holdfast"
)

// Modules that users import, by directory. They build with the previous Go.
var libraries = []string{".", "redlock/goredisnode", "redlock/rueidisnode", "etcdstore", "zkstore"}

// Modules that are not for import: they may use what they like.
var others = []string{"bench", "cmd/holdfast", "conformance", "examples"}

// Modules that only a server is built from. They are in no workspace, so that no other module
// gets the versions that they require.
var servers = []string{"conformance/etcdserver"}

// Packages that serve tests only. They may import testing and each other.
var helpers = []string{"store/storetest", "fence/fencetest", "servertest", "redlock/redistest", "internal/lint"}

// source is one Go file of the repository.
type source struct {
	name    string // relative to the root, with slashes
	module  string // directory of its module, "." for the root
	imports []string
	doc     bool
	test    bool
	ignored bool // by its build constraint: not part of the package
}

func (s source) dir() string { return path.Dir(s.name) }

// helper reports whether the file lies in a package that serves tests only.
func (s source) helper() bool {
	return slices.ContainsFunc(helpers, func(h string) bool {
		return s.dir() == h || strings.HasPrefix(s.dir(), h+"/")
	})
}

// read walks the repository: its Go files, and the directories that have a go.mod.
func read(t *testing.T) (files []source, modules []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		switch {
		case d.IsDir() && rel != "." && (d.Name() == "testdata" || strings.ContainsAny(d.Name()[:1], "._")):
			return fs.SkipDir
		case d.Name() == "go.mod":
			modules = append(modules, path.Dir(rel))
		case strings.HasSuffix(rel, ".go"):
			files = append(files, parse(t, name, rel))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 10 || len(modules) < 2 {
		t.Fatalf("found %d files and %d modules under %s: the walk is wrong", len(files), len(modules), root)
	}
	for i := range files {
		files[i].module = moduleOf(files[i].dir(), modules)
	}
	return files, modules
}

func parse(t *testing.T, name, rel string) source {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly|parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	s := source{
		name:    rel,
		doc:     f.Doc != nil && strings.TrimSpace(f.Doc.Text()) != "",
		test:    strings.HasSuffix(rel, "_test.go"),
		ignored: ignored(f),
	}
	for _, spec := range f.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			t.Fatal(err)
		}
		s.imports = append(s.imports, p)
	}
	return s
}

func ignored(f *ast.File) bool {
	for _, g := range f.Comments {
		for _, c := range g.List {
			if c.Pos() < f.Package && c.Text == "//go:build ignore" {
				return true
			}
		}
	}
	return false
}

// moduleOf returns the innermost module that holds dir.
func moduleOf(dir string, modules []string) string {
	for ; dir != "."; dir = path.Dir(dir) {
		if slices.Contains(modules, dir) {
			return dir
		}
	}
	return "."
}

func gomod(t *testing.T, module string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, module, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestRootRequiresNothing(t *testing.T) {
	for line := range strings.Lines(gomod(t, ".")) {
		switch word, _, _ := strings.Cut(strings.TrimSpace(line), " "); word {
		case "require", "replace", "exclude", "tool", "toolchain":
			t.Errorf("go.mod of the root has %q: the library brings nothing along", strings.TrimSpace(line))
		}
	}
	if _, err := os.Stat(filepath.Join(root, "go.sum")); err == nil {
		t.Error("the root has a go.sum")
	}
}

func TestImports(t *testing.T) {
	files, _ := read(t)
	for _, f := range files {
		library := slices.Contains(libraries, f.module)
		for _, p := range f.imports {
			inside, ours := strings.CutPrefix(p, mainPath+"/")
			ours = ours || p == mainPath
			std := !strings.Contains(strings.SplitN(p, "/", 2)[0], ".")
			if f.module == "." && !std && (!ours || moduleOf(inside, append(libraries[1:], others...)) != ".") {
				t.Errorf("%s imports %s: the root module and its tests use the standard library only", f.name, p)
			}
			if f.module != "." && ours && strings.HasPrefix(inside, "internal/") {
				t.Errorf("%s imports %s: a nested module never imports the root's internal packages", f.name, p)
			}
			if f.test || f.helper() || !library {
				continue
			}
			if p == "testing" || strings.HasPrefix(p, "testing/") {
				t.Errorf("%s imports %s: it would be linked into the user's program", f.name, p)
			}
			if (source{name: inside + "/x.go"}).helper() {
				t.Errorf("%s imports the test helper %s", f.name, p)
			}
		}
	}
}

func TestModulesAreListed(t *testing.T) {
	_, modules := read(t)
	work, err := os.ReadFile(filepath.Join(root, "go.work"))
	if err != nil {
		t.Fatal(err)
	}
	var listed []string
	for _, m := range regexp.MustCompile(`(?m)^\s*(?:use\s+)?(\.\S*)$`).FindAllStringSubmatch(string(work), -1) {
		listed = append(listed, path.Clean(m[1]))
	}
	modules = slices.DeleteFunc(modules, func(m string) bool { return slices.Contains(servers, m) })
	slices.Sort(modules)
	slices.Sort(listed)
	if !slices.Equal(modules, listed) {
		t.Errorf("go.work lists %q, the directories with a go.mod are %q", listed, modules)
	}
	known := slices.Sorted(slices.Values(slices.Concat(libraries, others)))
	if !slices.Equal(modules, known) {
		t.Errorf("this test knows the modules %q, the repository has %q: say which are libraries", known, modules)
	}
	if strings.Contains(string(work), "replace") {
		t.Error("go.work has a replace: it would hide what a module alone does")
	}
}

func TestModuleFiles(t *testing.T) {
	_, modules := read(t)
	for _, m := range modules {
		text := gomod(t, m)
		want := mainPath
		if m != "." {
			want += "/" + m
		}
		if !strings.HasPrefix(text, "module "+want+"\n") {
			t.Errorf("%s/go.mod does not begin with module %s", m, want)
		}
		if slices.Contains(libraries, m) && !regexp.MustCompile(`(?m)^go 1\.25(\.0)?$`).MatchString(text) {
			t.Errorf("%s/go.mod does not say go 1.25: users of the previous Go could not import it", m)
		}
		for _, r := range regexp.MustCompile(`(?m)^.* => .*$`).FindAllString(text, -1) {
			from, to, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(r), "replace "), " => ")
			inside, ours := strings.CutPrefix(from, mainPath)
			if !ours || path.Join(m, to) != path.Clean("./"+inside) {
				t.Errorf("%s/go.mod: %q: only modules of this repository are replaced, by their own directory", m, r)
			}
		}
	}
}

func TestPackagesAreDocumented(t *testing.T) {
	files, _ := read(t)
	documented := map[string]bool{}
	for _, f := range files {
		if f.test || f.ignored {
			continue
		}
		documented[f.dir()] = documented[f.dir()] || f.doc
	}
	for _, dir := range slices.Sorted(maps.Keys(documented)) {
		if !documented[dir] {
			t.Errorf("package in %s has no doc comment", dir)
		}
	}
}
