package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	if os.Getenv("GORACE") == "" { // a program built with -race sleeps a second at its end
		os.Setenv("GORACE", "atexit_sleep_ms=0")
	}
	testscript.Main(m, programs)
}

// programs are what the tests run, beside those of the system.
var programs = map[string]func(){
	"holdfast": main,
	"showargs": showArgs,
	"incr":     increment,
}

// TestScripts runs testdata/script. Each script has a SQLite store of its own, which
// HOLDFAST_STORE names.
func TestScripts(t *testing.T) {
	hearHangup(t)
	testscript.Run(t, scripts(nil))
}

// hearHangup is for tests that run under nohup: programs that they start would ignore HUP as well.
func hearHangup(t *testing.T) {
	if signal.Ignored(syscall.SIGHUP) {
		taken := make(chan os.Signal, 1)
		signal.Notify(taken, syscall.SIGHUP)
		t.Cleanup(func() { signal.Ignore(syscall.SIGHUP) })
	}
}

// scripts are the terms of testdata/script. setup may change the environment of each.
func scripts(setup func(env *testscript.Env)) testscript.Params {
	return testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			env.Setenv("HOLDFAST_STORE", "sqlite:"+env.WorkDir+"/locks.db")
			env.Setenv("K", filepath.Base(env.WorkDir)) // for keys of this script alone
			env.Setenv("N", "--nonblock")
			env.Setenv("GORACE", os.Getenv("GORACE"))
			if setup != nil {
				setup(env)
			}
			return nil
		},
		RequireExplicitExec: true,
		Condition:           condition,
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"code": code,
			"file": waitForFile,
		},
	}
}

// condition: [pidns] where we may make a PID namespace, [root] where we are root.
func condition(name string) (bool, error) {
	if name == "root" {
		return os.Geteuid() == 0, nil
	}
	if name != "pidns" {
		return false, fmt.Errorf("unknown condition %q", name)
	}
	return exec.Command("unshare", "-p", "-f", "--mount-proc", "true").Run() == nil, nil
}

// code CODE program args...: the program ends with this exit code.
func code(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		got = e.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// file NAME: waits until the file exists.
func waitForFile(ts *testscript.TestScript, _ bool, args []string) {
	for range 1000 {
		if _, err := os.Stat(ts.MkAbs(args[0])); err == nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	ts.Fatalf("%s does not appear", args[0])
}

func showArgs() {
	for i, a := range os.Args[1:] {
		fmt.Printf("%d %q\n", i, a)
	}
}
