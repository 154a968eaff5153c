package sqlfence

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/holdfast-go/holdfast/fence"
)

// layout says where marks are. Names of columns are quoted; an empty one is not there.
type layout struct {
	table            tableName
	own              bool
	id, token, seq   string
	prevToken        string // the last (token, seq) of the token before
	prevSeq          string
	idName, tokName  string // as the user wrote them
	seqName          string
	prevTok, prevSqN string
}

const (
	defaultTable  = "holdfast_fence"
	schemaVersion = 1
	// versionRow is the resource whose token is the version of the own table: no resource
	// has this name.
	versionRow = ""
)

func newLayout(o Options) (l layout, err error) {
	table := o.Table
	if table == "" {
		table = defaultTable
	}
	l = layout{own: true, idName: "resource", tokName: "token", seqName: "seq", prevTok: "prev_token", prevSqN: "prev_seq"}
	if c := o.Column; c != nil {
		if o.Table != "" {
			return l, &fence.InvalidError{Field: "table", Value: o.Table, Rule: "goes without Column, which names the user's table"}
		}
		table, l = c.Table, layout{idName: c.ID, tokName: c.Token, seqName: c.Seq}
	}
	if l.table, err = o.Dialect.table(table); err != nil {
		return l, err
	}
	if l.id, err = o.Dialect.quote("column of the resource", l.idName); err != nil {
		return l, err
	}
	if l.token, err = o.Dialect.quote("column of the token", l.tokName); err != nil {
		return l, err
	}
	if l.seqName != "" {
		if l.seq, err = o.Dialect.quote("column of the sequence", l.seqName); err != nil {
			return l, err
		}
	}
	if l.own {
		l.prevToken, _ = o.Dialect.quote("", l.prevTok)
		l.prevSeq, _ = o.Dialect.quote("", l.prevSqN)
	}
	return l, nil
}

// row is what the database holds for a resource. NULL is read as zero.
type row struct {
	exists             bool
	token, seq         int64
	prevToken, prevSeq int64
}

// how says which marks a claim passes.
type how int

const (
	raise how = iota // to the token; the token is not used
	monotonic
	once
	sequenced
)

var hows = map[Mode]how{Monotonic: monotonic, Once: once, Sequenced: sequenced}

// claim is one mark in one transaction.
type claim struct {
	resource string
	token    int64
	// seq becomes the row's: the caller's in mode Sequenced, zero where the token is not
	// used, and else random, so that no other transaction has it.
	seq    int64
	how    how
	hasSeq bool // the layout has a column for it
	// before is the seq that the claim has found; zero where it is not known.
	before int64
	// lost is the error of a commit after which the claim was made again without asking what
	// became of it, as one can that may be repeated.
	lost error
}

// passes reports whether a claim succeeds where r is found.
func (c *claim) passes(r row) bool {
	if r.token != c.token {
		return r.token < c.token
	}
	switch c.how {
	case monotonic:
		return true
	case once:
		return c.hasSeq && r.seq == 0
	case sequenced:
		return r.seq < c.seq
	}
	return false
}

// condition is passes in SQL, where the other arguments stand for its operands.
func (c *claim) condition(rowToken, rowSeq, token, seq string) string {
	switch {
	case c.how == monotonic:
		return rowToken + " <= " + token
	case c.how == once && c.hasSeq:
		return "(" + rowToken + " < " + token + " OR (" + rowToken + " = " + token + " AND " + rowSeq + " = 0))"
	case c.how == sequenced:
		return "(" + rowToken + " < " + token + " OR (" + rowToken + " = " + token + " AND " + rowSeq + " < " + seq + "))"
	}
	return rowToken + " < " + token
}

// standing reports whether r is as a successful claim leaves it, so that there is nothing
// to do for one that may be repeated.
func (c *claim) standing(r row) bool {
	return r.exists && r.token == c.token && (c.how == raise || c.how == monotonic && !c.hasSeq ||
		c.how != sequenced && c.hasSeq && r.seq == c.seq)
}

// outcome says what became of a transaction whose commit was not answered.
type outcome int

const (
	unsure outcome = iota
	applied
	notApplied
)

// outcome tells it by the row, which is locked, so that the transaction has ended. It
// relies on marks never going down, and within a token on a seq never coming back.
func (c *claim) outcome(r row, l *layout) outcome {
	switch {
	case !r.exists:
		return unsure
	case r.token < c.token:
		return notApplied
	case r.token == c.token && c.hasSeq:
		return c.bySeq(r.seq)
	case r.token > c.token && l.own && r.prevToken < c.token:
		return notApplied
	case r.token > c.token && l.own && r.prevToken == c.token:
		return c.bySeq(r.prevSeq)
	}
	return unsure
}

// bySeq is for the last seq of the token.
func (c *claim) bySeq(seq int64) outcome {
	switch {
	case seq == c.seq:
		return applied
	case seq == 0 || c.how == once || c.how == sequenced && seq < c.seq || c.how == monotonic && seq == c.before:
		return notApplied
	}
	return unsure
}

// claims makes a claim of each mark, sorted by resource, or refuses one of them.
func (g *Guard) claims(marks []Mark, h how) ([]*claim, error) {
	if len(marks) == 0 {
		return nil, &fence.InvalidError{Field: "marks", Rule: "must not be empty"}
	}
	cs := make([]*claim, len(marks))
	for i, m := range marks {
		if err := fence.CheckResource(m.Resource); err != nil {
			return nil, err
		}
		if err := fence.CheckToken(m.Token); err != nil {
			return nil, err
		}
		if h == sequenced && m.Seq <= 0 {
			return nil, &fence.InvalidError{Field: "seq", Value: fence.Token(m.Seq).String(), Rule: "must be positive in mode Sequenced; TxAll and ClaimIn take it"}
		}
		if h != sequenced && m.Seq != 0 {
			return nil, &fence.InvalidError{Field: "seq", Value: fence.Token(m.Seq).String(), Rule: "is for mode Sequenced only"}
		}
		cs[i] = &claim{resource: m.Resource, token: int64(m.Token), seq: m.Seq, how: h, hasSeq: g.l.seq != ""}
	}
	slices.SortFunc(cs, func(a, b *claim) int { return strings.Compare(a.resource, b.resource) })
	for i := range cs[1:] {
		if cs[i].resource == cs[i+1].resource {
			return nil, &fence.InvalidError{Field: "resource", Value: cs[i].resource, Rule: "must not be given twice"}
		}
	}
	return cs, nil
}

// renew gives the claim what one transaction needs.
func (c *claim) renew() {
	c.before = 0
	if c.how == monotonic || c.how == once {
		c.seq = 1 + rand.Int64N(math.MaxInt64)
	}
}
