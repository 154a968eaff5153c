package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/holdfast-go/holdfast/store"
)

const configVariable = "HOLDFAST_CONFIG"

// config is what the configuration file says. The zero value is that of no file.
//
// One file is read: the one that HOLDFAST_CONFIG names, else the user's, else the
// machine's. A flag beats it, and HOLDFAST_STORE beats its store. What it says about the
// terms of Redis servers is for its own store.
type config struct {
	stores []target
	ttl    time.Duration
	label  string
	marks  *marksSpec
}

// loadConfig reads the configuration file, if there is one. What is wrong with it is an
// [*store.InvalidError] that names file and line, and shows no password.
func loadConfig() (config, error) {
	path, err := configPath()
	if err != nil || path == "" {
		return config{}, err
	}
	b, mode, err := readConfig(path)
	if err != nil {
		return config{}, refuseConfig(path, "cannot be read: "+withoutPath(err))
	}
	c, err := parseConfig(path, b)
	if err != nil {
		return config{}, err
	}
	if c.secret() && mode&0o004 != 0 && runtime.GOOS != "windows" {
		return config{}, refuseConfig(path, "holds a password and everybody can read it: chmod o-r, or name a password-file in the URL")
	}
	return c, nil
}

// secret reports whether a URL holds a password itself.
func (c config) secret() bool {
	return slices.ContainsFunc(c.stores, target.secret) || c.marks != nil && c.marks.secret()
}

// configure takes what the configuration file says for flags that are not given.
func (f *claimFlags) configure(given func(flag string) bool) error {
	c, err := loadConfig()
	if err != nil {
		return failure(err)
	}
	f.ttlGiven = c.ttl != 0 || given("ttl")
	if c.ttl != 0 && !given("ttl") {
		f.ttl = c.ttl
	}
	if c.label != "" && !given("label") {
		f.label = c.label
	}
	return nil
}

// configPath is the file to read, or empty where there is none.
func configPath() (string, error) {
	if path := os.Getenv(configVariable); path != "" {
		return path, nil
	}
	for _, dir := range configDirs() {
		path := filepath.Join(dir, "holdfast", "config.toml")
		_, err := os.Stat(path)
		if err == nil {
			return path, nil
		}
		// A folder that may not be looked into could have the file that counts.
		if !errors.Is(err, fs.ErrNotExist) && !isNoFolder(err) {
			return "", refuseConfig(path, "cannot be read: "+withoutPath(err)+"; set HOME, or "+configVariable+" to the file that counts")
		}
	}
	return "", nil
}

// unreadConfig names a configuration file in root's home that is not read, or is empty. Whoever
// wrote it there expects its store, and a lock in another store excludes nobody.
func unreadConfig() string {
	home := homeDir()
	if os.Geteuid() != 0 || home == "" || os.Getenv(configVariable) != "" || filepath.IsAbs(os.Getenv("XDG_CONFIG_HOME")) {
		return ""
	}
	path := filepath.Join(home, ".config", "holdfast", "config.toml")
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

// warnUnread keeps the warning to one: a measurement opens the store several times.
var warnUnread sync.Once

// readConfig reads at most a megabyte.
func readConfig(path string) ([]byte, fs.FileMode, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	const limit = 1 << 20
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && len(b) > limit {
		err = errors.New("it is larger than 1 MiB")
	}
	return b, info.Mode(), err
}

// withoutPath is the reason alone: the path is said elsewhere.
func withoutPath(err error) string {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err.Error()
	}
	return err.Error()
}

func refuseConfig(path, rule string) error {
	return &store.InvalidError{Field: "configuration file", Value: path, Rule: rule}
}

const configKeys = "there are store, ttl, max-ttl, trust-restarts, label and marks"

// parseConfig reads the text of a file that path names for people.
func parseConfig(path string, text []byte) (config, error) {
	var values map[string]any
	text = bytes.TrimPrefix(text, []byte("\ufeff")) // the byte order mark, with which some editors begin
	if err := toml.Unmarshal(text, &values); err != nil {
		rule := strings.TrimPrefix(err.Error(), "toml: ")
		// The parser's text of several lines, which is not used, would show passwords.
		if at, ok := errors.AsType[*toml.DecodeError](err); ok {
			line, _ := at.Position()
			rule = fmt.Sprintf("line %d: %s", line, rule)
		}
		return config{}, refuseConfig(path, rule)
	}
	p := configParser{values: values}
	// The store last, with the terms that stand beside it.
	for _, key := range append(slices.DeleteFunc(slices.Sorted(maps.Keys(values)), isStore), "store") {
		if rule := p.take(key); rule != "" {
			return config{}, refuseConfig(path, lineOf(text, key)+showKey(key)+" "+rule)
		}
	}
	return p.config, nil
}

// showKey quotes a key that is no plain word, and cuts a long one.
func showKey(key string) string {
	if q := strconv.Quote(key[:min(len(key), 40)]); len(q) != len(key)+2 {
		return q
	}
	return key
}

func isStore(key string) bool { return key == "store" }

// lineOf says where a key stands, as far as it stands at the beginning of a line.
func lineOf(text []byte, key string) string {
	at := regexp.MustCompile(`(?m)^[ \t]*\[*["']?` + regexp.QuoteMeta(key) + `["']?[ \t]*[=.\]]`).FindIndex(text)
	if at == nil {
		return ""
	}
	return fmt.Sprintf("line %d: ", 1+bytes.Count(text[:at[0]], []byte("\n")))
}

type configParser struct {
	config
	values map[string]any
	maxTTL time.Duration
	trust  bool
}

// take takes a key and returns the rule that it breaks.
func (p *configParser) take(key string) (rule string) {
	v := p.values[key]
	ok := true
	switch key {
	case "ttl":
		p.ttl, rule = configDuration(v)
	case "max-ttl":
		p.maxTTL, rule = configDuration(v)
	case "trust-restarts":
		if p.trust, ok = v.(bool); !ok {
			rule = "must be true or false"
		}
	case "label":
		if p.label, ok = v.(string); !ok || p.label == "" {
			rule = "must be a text that is not empty"
		}
	case "store":
		rule = p.takeStores(v)
	case "marks":
		rule = p.takeMarks(v)
	default:
		rule = "is no key; " + configKeys
	}
	return rule
}

func configDuration(v any) (d time.Duration, rule string) {
	text, _ := v.(string)
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, `must be a positive duration with its unit, such as "30s"`
	}
	return d, ""
}

// takeStores takes a URL or a list of them.
func (p *configParser) takeStores(v any) (rule string) {
	const form = `must be a URL or a list of URLs, such as "redis://HOST"`
	list, isList := v.([]any)
	switch {
	case v == nil && (p.maxTTL != 0 || p.trust):
		return "is missing: max-ttl and trust-restarts are for the store of this file"
	case v == nil:
		return ""
	case isList && len(list) == 0:
		return form
	case !isList:
		list = []any{v}
	}
	for _, u := range list {
		text, ok := u.(string)
		if !ok {
			return form
		}
		s, err := parseStore(text)
		if err == nil {
			err = s.fromFile(p.maxTTL, p.trust)
		}
		if err != nil {
			return "is refused: " + err.Error()
		}
		p.stores = append(p.stores, s)
	}
	if err := checkJoined(p.stores); err != nil {
		return "is refused: " + err.Error()
	}
	return ""
}

// takeMarks takes the URL of marks.
func (p *configParser) takeMarks(v any) (rule string) {
	text, ok := v.(string)
	if !ok {
		return `must be a URL, such as "file:/var/lib/backup/marks"`
	}
	s, err := parseMarks(text)
	if err == nil {
		err = s.fromFile(0, false)
	}
	if err != nil {
		return "is refused: " + err.Error()
	}
	p.marks = &s
	return ""
}

func (s *storeSpec) fromFile(maxTTL time.Duration, trust bool) error {
	for _, f := range append(s.files(), &s.path) {
		if *f != "" && !filepath.IsAbs(*f) {
			return s.refuse(relativePath(*f))
		}
	}
	switch {
	case !isRedis(s.scheme) && (maxTTL != 0 || trust):
		return s.refuse("takes no max-ttl and no trust-restarts; they belong to redis://")
	case maxTTL != 0 && s.maxTTL != 0 && s.maxTTL != maxTTL:
		return s.refuse("has another max-ttl than the file; give one")
	case trust && s.trustRestarts != nil && !*s.trustRestarts:
		return s.refuse("says the contrary of the file's trust-restarts; give one")
	case maxTTL != 0:
		s.maxTTL = maxTTL
	}
	if trust {
		s.trustRestarts = &trust
	}
	return nil
}

func relativePath(path string) (rule string) {
	return "in a configuration file a path must be absolute, " + path + " is not"
}
