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
	//go:embed direct.lua
	directText string
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
		release:  newRelease("", ""),
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
	id := replid
	if c == checkNone {
		id = "-"
	}
	return &voteScript{NewScript(switched("vote", fill(text))), c, newRelease(admittedAs(replid, c), id), id}
}

// admittedAs is the condition, in a script, that the server is still the one that was admitted.
func admittedAs(replid string, c check) string {
	if c == checkNone || off(ruleV) {
		return "true"
	}
	same := "string.match(pcall('INFO', 'replication'), 'master_replid:(%x+)') == '" + replid + "'"
	if c == checkCached {
		same = "pcall('GET', '" + checkedKey + "') == '" + replid + "' or " + same
	}
	return "(" + same + ")"
}

// newRelease returns RELEASE: where the condition is not empty, a hand-over under it is a grant.
func newRelease(admitted, id string) *Script {
	direct := ""
	if admitted != "" {
		direct = strings.NewReplacer("--[[ADMITTED]]", admitted, "@ID@", id).Replace(directText)
	}
	return NewScript(switched("release", fill(strings.Replace(releaseText, "--[[DIRECT]]\n", direct, 1))))
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
