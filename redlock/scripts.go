package redlock

import (
	_ "embed"
	"strconv"
	"strings"
	"time"
)

// Constants of the protocol (docs/protocol.md 1.1). They are compiled in: two clients with
// different values void the proof.
const (
	aheadLimit = 5 * time.Second   // AHEAD: how far a stamp may be ahead of a node's clock
	markMargin = 5 * time.Second   // MARGIN: how far behind it is refused
	markLife   = 120 * time.Second // E: life of a mark (rule S)
	queueLife  = time.Hour         // of a queue, after its last entry
)

var (
	//go:embed vote.lua
	voteText string
	//go:embed check.lua
	checkText string
	//go:embed keep.lua
	keepText string
	//go:embed release.lua
	releaseText string
	//go:embed probe.lua
	probeText string
	//go:embed record.lua
	recordText string
	//go:embed promoted.lua
	promotedText string
)

// scripts are those that every server may run at any time.
type scripts struct {
	keep, release, record, promoted, probe *Script
}

func newScripts() scripts {
	return scripts{
		keep:     NewScript(switched("keep", fill(keepText))),
		release:  newRelease(),
		record:   NewScript(recordText),
		promoted: NewScript(promotedText),
		probe:    NewScript(probeText),
	}
}

// check says how a VOTE script makes sure that the server is the one that was admitted.
type check string

const (
	checkAlways check = "always" // compares the replication id at every call
	checkCached check = "cached" // compares it once a second
	checkNone   check = "none"   // TrustRestarts: loads nothing for strict clients, as its text differs
)

// voteScript is VOTE as one server was admitted with it.
type voteScript struct {
	*Script
	checks  check
	release *Script // whose hand-overs may be grants
	id      string  // by which they name what they were admitted as
}

// newVote returns the VOTE script of a server: its text carries the replication id for
// which it was admitted, and the longest ttl.
func newVote(replid string, c check, maxTTL time.Duration) *voteScript {
	body, checked := "", "" // a key of the text's own: it is not used on a Cluster
	if c != checkNone && !off(ruleV) {
		remember := ""
		if c == checkCached {
			remember = "redis.pcall('SET', '" + checkedKey + "', '@REPLID@', 'PX', 1000)"
			checked = ", '" + checkedKey + "'"
		}
		body = strings.Replace(checkText, "--[[REMEMBER]]", remember, 1)
	}
	text := strings.NewReplacer(
		"--[[CHECK]]\n", body,
		"--[[CHECKED]]", checked,
	).Replace(voteText)
	text = strings.NewReplacer(
		"@REPLID@", replid,
		"@CHECK@", string(c),
		"@MAXTTL@", strconv.FormatInt(maxTTL.Milliseconds(), 10),
	).Replace(text)
	release, id := newDirect(replid, c)
	return &voteScript{NewScript(switched("vote", fill(text))), c, release, id}
}

// newRelease returns the RELEASE that every server may run: its hand-overs are no grants.
func newRelease() *Script { return releaseOf(releaseText, "false", "", "") }

// newDirect returns the RELEASE of an admitted server, whose hand-overs are grants, and the name by which
// they say as what it was admitted. The vote then ends by TIME, from which the waiter counts, and not by the
// time at which the server began to run the script. SET does that from Redis 6.2 on.
func newDirect(replid string, c check) (release *Script, id string) {
	same := "string.match(pcall('INFO', 'replication'), 'master_replid:(%x+)') == '" + replid + "'"
	byTime := " and pcall('PEXPIREAT', vote, math.floor(now / 1000) + reserve) == 1"
	switch {
	case c == checkNone:
		return releaseOf(releaseText, "true", byTime, "-"), "-"
	case off(ruleV):
		return releaseOf(releaseText, "true", byTime, replid), replid
	case c == checkAlways:
		return releaseOf(releaseText, same, byTime, replid), replid
	}
	text := strings.NewReplacer(
		"  local F = pcall('GET', mark)\n", "  local got = pcall('MGET', mark, '"+checkedKey+"')\n"+
			"  if got.err then got = {pcall('GET', mark)} end\n"+ // a mark that is not read would fall
			"  local F = got[1]\n  checked = got[2]\n",
		"'PX', reserve)", "'PXAT', math.floor(now / 1000) + reserve)",
	).Replace(releaseText)
	return releaseOf(text, "(checked == '"+replid+"' or "+same+")", "", replid), replid
}

func releaseOf(text, admitted, byTime, id string) *Script {
	text = strings.NewReplacer("@ADMITTED@", admitted, "@BYTIME@", byTime, "@ID@", id).Replace(text)
	return NewScript(switched("release", fill(text)))
}

// fill writes the constants into a script.
func fill(text string) string {
	return strings.NewReplacer(
		"@AHEAD@", strconv.FormatInt(aheadLimit.Microseconds(), 10),
		"@MARGIN@", strconv.FormatInt(markMargin.Microseconds(), 10),
		"@QUEUELIFE@", strconv.FormatInt(queueLife.Milliseconds(), 10),
		"@LIFE@", strconv.FormatInt(markLife.Milliseconds(), 10),
	).Replace(text)
}
