package sqlstore

import (
	"cmp"
	"database/sql"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// schemaVersion is the version of the tables, of every dialect.
const schemaVersion = 1

func checkVersion(version string) error {
	if version != strconv.Itoa(schemaVersion) {
		return badDatabase("has tables of version "+strconv.Quote(version)+", this program knows "+strconv.Itoa(schemaVersion)+"; use a later program", nil)
	}
	return nil
}

// row is what the table holds for a key. It stays for ever, because its token is the memory of
// the key. An empty owner means that nobody holds the key.
type row struct {
	exists bool
	key    string
	owner  string
	token  int64
	left   time.Duration // of the grant, when the row was read
	label  string
	again  bool // of a release: it was sent before, and may have been executed then
}

// live reports whether somebody holds the key.
func (r row) live() bool { return r.owner != "" && r.left > 0 }

func (r row) holder() store.Holder {
	return store.Holder{Key: r.key, Owner: r.owner, Label: r.label, Token: fence.Token(r.token), TTL: r.left,
		Broken: strings.HasPrefix(r.owner, brokenBy),
		// The token is the wall clock at the grant, unless that had gone back.
		Held: max(0, time.Since(time.UnixMicro(r.token)))}
}

func (r row) held() *store.HeldError { return &store.HeldError{Holder: r.holder()} }

// loss is nil where owner holds the key, and else says who does.
func (r row) loss(owner string) error {
	switch live := r.live(); {
	case live && r.owner == owner:
		return nil
	case live:
		return &store.LostError{By: r.held()}
	}
	return &store.LostError{}
}

// gone is the loss of a grant that was not found.
func (r row) gone(owner string) error { return cmp.Or(r.loss(owner), error(&store.LostError{})) }

// brokenBy marks an owner whose grant was broken. Nobody holds the key under that name.
const brokenBy = "broken:"

func brokenOwner(owner string) string { return brokenBy + strings.TrimPrefix(owner, brokenBy) }

// broken says whether the grant of owner need not be broken any more, or why it cannot be.
func (r row) broken(owner string) (done bool, err error) {
	switch {
	case !r.live():
		return false, &store.LostError{}
	case r.owner == brokenOwner(owner):
		return true, nil
	case r.owner != owner:
		return false, r.held()
	}
	return false, nil
}

// nextToken is larger than every token of the row, and as good as any clock where the
// row was lost.
func (r row) nextToken() (int64, error) {
	if r.token == math.MaxInt64 {
		return 0, errTokensUsedUp(nil)
	}
	return max(r.token+1, time.Now().UnixMicro()), nil
}

func errTokensUsedUp(cause error) error {
	return badDatabase("has used up the tokens of the key", cause)
}

// scanPage reads and closes rows.
func scanPage(rows *sql.Rows, one func(scan func(...any) error) (row, error)) (page []row, err error) {
	defer rows.Close()
	for rows.Next() {
		r, err := one(rows.Scan)
		if err != nil {
			return nil, err
		}
		r.exists = true
		page = append(page, r)
	}
	return page, rows.Err()
}

// cutLabel cuts a label to 64 bytes of valid text without NUL, which PostgreSQL does not take.
func cutLabel(label string) string {
	label = strings.ReplaceAll(label, "\x00", "")
	return strings.ToValidUTF8(label[:min(len(label), 64)], "")
}
