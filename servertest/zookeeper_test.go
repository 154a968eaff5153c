package servertest

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestZooKeeperRestart(t *testing.T) {
	t.Parallel()
	s := ZooKeeper(t)
	if text, err := s.Ask("srvr"); err != nil || !strings.Contains(text, "Mode: standalone") {
		t.Fatalf("srvr answers %q, %v", text, err)
	}
	s.Kill()
	if text, err := s.Ask("srvr"); err == nil {
		t.Errorf("a server that was killed answers %q", text)
	}
	s.Restart()
	if text, err := s.Ask("ruok"); err != nil || text != "imok" {
		t.Errorf("a restarted server answers %q, %v", text, err)
	}
}

// A follower whose link to the leader is cut notices it, and is back when that is mended.
func TestZooKeeperEnsembleLink(t *testing.T) {
	t.Parallel()
	e := NewZooKeeperEnsemble(t, 3, ZooKeeperLinks(), ZooKeeperConfig("syncLimit", "5"))
	leader, followers := e.Leader(), e.Followers()
	if len(followers) != 2 {
		t.Fatalf("%d members follow, want 2", len(followers))
	}
	link := e.Link(followers[0], leader)
	link.BlackHole()
	Eventually(t, 30*time.Second, func() error {
		if mode, err := followers[0].mode(); err == nil && mode == "follower" {
			return errors.New("a follower that is cut off goes on serving")
		}
		return nil
	})
	if link.Counts().BlackHoled == 0 {
		t.Error("nothing fell into the black hole")
	}
	link.Reset()
	link.Heal()
	if err := followers[0].serving(); err != nil {
		t.Error(err)
	}
}
