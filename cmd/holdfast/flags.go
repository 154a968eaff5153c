package main

import (
	"errors"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/store"
)

// add adds the flags that say which store.
func (f *storeFlags) add(flags *pflag.FlagSet) {
	flags.StringArrayVar(&f.urls, "store", nil, "`URL` of the store; repeat it for Redlock (default $HOLDFAST_STORE, else a file of the user)")
	flags.DurationVar(&f.maxTTL, "max-ttl", 0, "longest ttl that any client of these Redis servers asks for (default 30s)")
	flags.BoolVar(&f.trustRestarts, "trust-restarts", false, "let a Redis server vote at once after a restart; only where it loses nothing. The same for all its clients")
}

func (f *storeFlags) check(given func(flag string) bool) error {
	if given("max-ttl") && f.maxTTL <= 0 {
		return usage("invalid --max-ttl %v: must be positive", f.maxTTL)
	}
	return nil
}

// flagError says what is wrong with a value in words of people: pflag has those of strconv.
func flagError(_ *cobra.Command, err error) error {
	bad, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	flag, value := bad.GetFlag(), bad.GetValue()
	rule := ""
	_, notNumber := strconv.ParseFloat(value, 64)
	switch {
	case flag.Value.Type() == "uint8" && flag.Name == "lost-exit-code":
		rule = "must be from 1 to 255"
	case flag.Value.Type() == "uint8":
		rule = "must be from 0 to 255"
	case flag.Value.Type() == "duration" && notNumber == nil:
		rule = "needs a unit, such as 5s or 10m"
	case flag.Value.Type() == "duration":
		rule = "must be a number with a unit, such as 5s or 10m"
	case flag.Value.Type() == "int":
		rule = "must be a number"
	default:
		return err
	}
	return usage("invalid --%s %q: %s", flag.Name, value, rule)
}

// claimFlags are those of the verbs that acquire a key.
type claimFlags struct {
	store        storeFlags
	ttl          time.Duration
	wait         time.Duration
	nonblock     bool
	conflictCode uint8
	label        string

	ttlGiven bool // by the flag or the configuration file
}

// fit takes the ttl that st keeps where none was given, and reports whether that is another one.
func (f *claimFlags) fit(st store.Store) bool {
	if f.ttlGiven {
		return false
	}
	i := st.Info()
	ttl := max(f.ttl, i.MinTTL)
	if i.MaxTTL > 0 {
		ttl = min(ttl, i.MaxTTL)
	}
	changed := ttl != f.ttl
	f.ttl = ttl
	return changed
}

// add adds the flags. ttlUsage says what the ttl means to the verb.
func (f *claimFlags) add(flags *pflag.FlagSet, ttlUsage string) {
	f.store.add(flags)
	flags.DurationVar(&f.ttl, "ttl", holdfast.DefaultTTL, ttlUsage)
	flags.DurationVarP(&f.wait, "wait", "w", 0, "wait for KEY and for the store at most this long (default without end)")
	flags.BoolVarP(&f.nonblock, "nonblock", "n", false, "do not wait")
	flags.Uint8VarP(&f.conflictCode, "conflict-exit-code", "E", exitConflict, "exit `CODE` where another holds KEY")
	flags.StringVar(&f.label, "label", "", "`TEXT` that tells people who holds KEY (default host:pid)")
}

// check also takes what the configuration file says for flags that are not given.
func (f *claimFlags) check(given func(flag string) bool) error {
	switch {
	case f.nonblock && given("wait"):
		return usage("--wait and --nonblock exclude each other")
	case given("wait") && f.wait <= 0:
		return usage("invalid --wait %v: must be positive; --nonblock does not wait", f.wait)
	}
	if err := f.configure(given); err != nil {
		return err
	}
	return f.store.check(given)
}
