//go:build holdfast_rules

package rules

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/holdfast-go/holdfast/redlock"
)

// scenario is a counterexample of section 7. It answers what was violated, or nothing.
type scenario struct {
	rule string // as redlock.SwitchOff names it
	name string
	run  func(e *env) (violation string)
}

var scenarios = []scenario{
	{"A", "two parts of a network", twoParts},
	{"B", "slow replies", slowReplies},
	{"C", "clocks of different rates", differentRates},
	{"D", "release of a lapsed lease", lapsedRelease},
	{"E", "late release of an earlier attempt", lateRelease},
	{"F", "late answers of an older extension", olderExtension},
	{"G", "late shorter extension", shorter("KEEP")},
	{"G", "late shorter vote", shorter("VOTE")},
	{"H", "reservation that leaves the mark", reservedStamp},
	{"I", "acceptances of two stamps", twoStamps},
	{"J", "the same stamp again", sameStamp},
	{"K", "a low stamp retransmitted", lowTwice},
	{"L", "late answers", revived(byLateAnswers)},
	{"L", "extension after the end", revived(byExtension)},
	{"L", "adoption after the end", revived(byAdoption)},
	{"M", "vote overtaken by its release", ghostVote(0)},
	{"M", "vote overtaken at a node whose clock is behind", ghostVote(5500 * time.Millisecond)},
	{"m", "release not repeated at a node whose clock is behind", ghostVote(5500 * time.Millisecond)},
	{"N", "rolling restarts after a loser's mark", rollingRestarts},
	{"O", "healing beside a newer holder", tokenOfHealing},
	{"P", "votes of a node that forgot", youngNode},
	{"P", "votes of a node that went back", promiseOver},
	{"Q", "vote of a client a year ahead", yearAhead},
	{"Q", "release of a client a year ahead", yearAheadRelease},
	{"R", "client an hour behind at an older snapshot", hourBehind},
	{"S", "mark that ends early", shortMark},
	{"S", "node that votes early", shortQuarantine},
	{"S", "node that votes early, of short ttls", shortQuarantineTokens},
	{"T", "node an hour ahead", badClock},
	{"T", "node an hour ahead, and a waiter", badClockWaiter},
	{"U", "deletion on the only node", deleted(1)},
	{"U", "deletion on three nodes", deleted(3)},
	{"U", "deletion before an adoption", deletedTicket},
	{"u", "break of the only node", brokenWhileValid(1)},
	{"u", "break of three nodes", brokenWhileValid(3)},
	{"u", "break, and an extension on its way", brokenDuringExtension},
	{"u", "break, and a late vote", brokenBeforeVote},
	{"u", "healing between the breaks of two nodes", healedBetweenBreaks},
	{"V", "failback to a demoted primary", failback},
	{"V", "script that survives a restart", scriptSurvives},
	{"W", "news of a hand-over that come late", lateNews},
}

// letters are the rules of section 7.
const letters = "ABCDEFGHIJKLMNOPQRSTUVW"

func TestRules(t *testing.T) {
	for _, letter := range letters {
		t.Run(string(letter), func(t *testing.T) {
			found := 0
			for _, s := range scenarios {
				if strings.ToUpper(s.rule) == string(letter) {
					found++
					t.Run(strings.ReplaceAll(s.name, " ", "-"), s.test)
				}
			}
			if found == 0 {
				t.Errorf("rule %c has no scenario", letter)
			}
		})
	}
}

func (s scenario) test(t *testing.T) {
	t.Run("on", func(t *testing.T) {
		if v := s.play(t); v != "" {
			t.Errorf("rule %s holds, and yet: %s", s.rule, v)
		}
	})
	t.Run("off", func(t *testing.T) {
		defer redlock.SwitchOff(s.rule)()
		v := s.play(t)
		if v == "" {
			t.Errorf("without rule %s nothing breaks: the test does not pin it", s.rule)
		}
		t.Logf("without rule %s: %s", s.rule, v)
	})
}

func (s scenario) play(t *testing.T) string {
	e := newEnv(t)
	defer e.finish()
	return s.run(e)
}

// silent keeps go-redis from writing about servers that scenarios have ended.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// TestMain fails where goroutines are left a while after the tests.
func TestMain(m *testing.M) {
	goredis.SetLogger(silent{})
	code := m.Run()
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		err := goleak.Find()
		if err == nil {
			break
		}
		if time.Now().After(end) {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
			break
		}
	}
	os.Exit(code)
}
