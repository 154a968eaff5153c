package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "holdfast %s %s %s/%s\n", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
			if err != nil {
				return &exit{exitFailed, err}
			}
			return nil
		},
	}
}

// releaseVersion is the version of a binary from .ci/release, which the linker sets.
var releaseVersion string

// version is what the build says of itself: the module's version, or the commit.
func version() string {
	if releaseVersion != "" {
		return releaseVersion
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	if v == "" || v == "(devel)" {
		v = "devel"
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				v += "-" + s.Value[:min(12, len(s.Value))]
			case s.Key == "vcs.modified" && s.Value == "true":
				v += "-dirty"
			}
		}
	}
	return v
}
