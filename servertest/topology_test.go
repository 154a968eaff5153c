package servertest

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
)

func TestRedisCluster(t *testing.T) {
	servers := RedisCluster(t, 3)
	wrong := 0
	for i := range 20 {
		_, err := servers[0].Do("SET", "key"+strconv.Itoa(i), "x")
		if err == nil {
			continue
		}
		if !strings.HasPrefix(err.Error(), "MOVED ") {
			t.Errorf("SET: %v", err)
		}
		wrong++
	}
	if wrong == 0 || wrong == 20 {
		t.Errorf("%d of 20 keys are elsewhere", wrong)
	}
}

func TestSentinelFailsOver(t *testing.T) {
	primary := Redis(t)
	replica := Redis(t, ReplicaOf(primary))
	replica.WaitLinked()
	s := Sentinel(t, "main", primary)
	master := func() string {
		v := mustDo(t, s, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main").([]any)
		return fmt.Sprint(v[0], ":", v[1])
	}
	if master() != primary.Addr() {
		t.Fatalf("master is %s", master())
	}
	primary.Kill()
	Eventually(t, startTimeout, func() error {
		if m := master(); m != replica.Addr() {
			return fmt.Errorf("master is %s", m)
		}
		return nil
	})
	Eventually(t, startTimeout, func() error { _, err := replica.Do("SET", "a", "1"); return err })
}
