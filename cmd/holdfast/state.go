package main

import (
	"errors"
	"os"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
)

// defaultPath is the file of the store where neither a flag nor the environment names
// one: in the state folder of the user, so that all of the user's processes on this
// machine share it.
//
// It must not depend on how a process was started, since cron and a shell that used
// different files would not exclude each other. So root has the machine's folder,
// whatever HOME is (sudo may keep the caller's), and where HOME is unset the user database
// tells it. Whoever sets XDG_STATE_HOME has to set it for all.
func defaultPath() (string, error) {
	dir, err := stateDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "holdfast", "locks.db"), nil
}

func stateDir() (string, error) {
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) { // a relative one is to be ignored, says XDG
		return dir, nil
	}
	if runtime.GOOS == "windows" {
		return os.UserCacheDir() // %LocalAppData%
	}
	if os.Geteuid() == 0 {
		return "/var/lib", nil
	}
	home := homeDir()
	if home == "" {
		return "", errors.New("there is no folder for the default store: set HOLDFAST_STORE (or HOME, or XDG_STATE_HOME), or give --store")
	}
	return filepath.Join(home, ".local", "state"), nil
}

// homeDir is the user's, or empty where there is none.
func homeDir() string {
	home := os.Getenv("HOME")
	if home == "" {
		if u, err := user.Current(); err == nil {
			home = u.HomeDir
		}
	}
	if !filepath.IsAbs(home) {
		return ""
	}
	return home
}

// configDirs are the folders of the user's and of the machine's configuration. As with the
// store, root's does not depend on HOME.
func configDirs() []string {
	if runtime.GOOS == "windows" {
		return absolute(os.Getenv("AppData"), os.Getenv("ProgramData"))
	}
	own := os.Getenv("XDG_CONFIG_HOME")
	if home := homeDir(); !filepath.IsAbs(own) && home != "" && os.Geteuid() != 0 {
		own = filepath.Join(home, ".config")
	}
	return absolute(own, "/etc")
}

// absolute are those of the paths that are: a relative one is to be ignored, says XDG.
func absolute(paths ...string) []string {
	return slices.DeleteFunc(paths, func(p string) bool { return !filepath.IsAbs(p) })
}

// isNoFolder says that a part of a path is no folder.
func isNoFolder(err error) bool { return errors.Is(err, syscall.ENOTDIR) }
