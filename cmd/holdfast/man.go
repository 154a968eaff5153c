package main

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/cpuguy83/go-md2man/v2/md2man"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

const manHelp = `Print the manual page of holdfast, or of VERB, as roff: the text of --help.

  holdfast man run | man -l -
  holdfast man run >/usr/local/share/man/man1/holdfast-run.1`

func manCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "man [VERB]",
		Short: "Print a manual page",
		Long:  manHelp,
		Args:  cobra.MaximumNArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) (names []string, _ cobra.ShellCompDirective) {
			for _, c := range verbs(cmd.Root()) {
				if len(args) == 0 {
					names = append(names, cobra.CompletionWithDesc(c.Name(), c.Short))
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			page := cmd.Root()
			if len(args) > 0 {
				page = nil
				for _, c := range verbs(cmd.Root()) {
					if c.Name() == args[0] {
						page = c
					}
				}
			}
			if page == nil {
				return usage("there is no verb %q; holdfast --help lists them", args[0])
			}
			if err := printText(string(md2man.Render([]byte(manPage(page))))); err != nil {
				return failure(err)
			}
			return nil
		},
	}
}

// verbs are the commands that people use.
func verbs(root *cobra.Command) (all []*cobra.Command) {
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() {
			all = append(all, c)
		}
	}
	return all
}

// manPage writes the page of a command in Markdown. No date: the same version prints the
// same page.
func manPage(cmd *cobra.Command) string {
	var b strings.Builder
	name := strings.ReplaceAll(cmd.CommandPath(), " ", "-")
	fmt.Fprintf(&b, "%% %q \"1\" \"\" %q \"Holdfast\"\n", strings.ToUpper(name), "holdfast "+version())
	fmt.Fprintf(&b, "# NAME\n%s \\- %s\n\n", name, markdown(cmd.Short))
	fmt.Fprintf(&b, "# SYNOPSIS\n%s\n\n", markdown(synopsis(cmd)))
	text := cmd.Long
	if text == "" {
		text = cmd.Short
	}
	b.WriteString("# DESCRIPTION\n" + manText(text))
	if !cmd.HasParent() {
		b.WriteString("# VERBS\n")
		for _, c := range verbs(cmd) {
			fmt.Fprintf(&b, "**%s**\n: %s. See %s-%s(1).\n\n", c.Name(), markdown(c.Short), name, c.Name())
		}
	}
	b.WriteString("# OPTIONS\n")
	cmd.InitDefaultHelpFlag()
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) { b.WriteString(manFlag(f)) })
	if cmd.Example != "" {
		b.WriteString("# EXAMPLES\n\n" + manText(cmd.Example))
	}
	if cmd.HasParent() {
		b.WriteString("# SEE ALSO\nholdfast(1)\n")
	}
	return b.String()
}

func synopsis(cmd *cobra.Command) string {
	if !cmd.HasParent() {
		return cmd.Name() + " VERB [flags] [ARGS]"
	}
	return cmd.Parent().Name() + " " + cmd.Use
}

func manFlag(f *pflag.Flag) string {
	value, text := pflag.UnquoteUsage(f)
	name := "**--" + f.Name + "**"
	if f.Shorthand != "" {
		name = "**-" + f.Shorthand + "**, " + name
	}
	if value != "" {
		name += " " + markdown(value)
	}
	if d := f.DefValue; d != "" && d != "[]" && d != "0" && d != "0s" && d != "false" {
		text += " (default " + d + ")"
	}
	return name + "\n: " + markdown(text) + "\n\n"
}

// manText turns the text of a help into Markdown: a line that ends in a colon, with indented
// lines behind it, is a heading where it is short, and indented lines stay as they are.
func manText(text string) string {
	var b strings.Builder
	lines := strings.Split(text, "\n")
	inside := false // of indented lines
	for i, line := range lines {
		indented := strings.HasPrefix(line, "  ")
		if indented != inside && line != "" {
			b.WriteString("\n")
			inside = indented
		}
		title, ok := strings.CutSuffix(line, ":")
		first := i == 0 || lines[i-1] == ""
		follows := i+1 < len(lines) && strings.HasPrefix(lines[i+1], "  ")
		switch {
		case indented:
			b.WriteString("    " + line[2:] + "\n")
		case ok && first && follows && len(title) < 40 && title != "":
			b.WriteString("# " + strings.ToUpper(markdown(title)) + "\n")
		default:
			b.WriteString(lineStart.ReplaceAllString(markdown(line), `$1\$2`) + "\n")
		}
	}
	return b.String() + "\n"
}

// lineStart is what has a meaning at the beginning of a line only.
var lineStart = regexp.MustCompile(`^(\d*)([-+:=.)])`)

// markdown escapes what would have a meaning.
func markdown(text string) string { return markdownEscapes.Replace(text) }

var markdownEscapes = strings.NewReplacer(`\`, `\\`, "`", "\\`", "*", `\*`, "_", `\_`, "[", `\[`, "]", `\]`, "<", `\<`, ">", `\>`,
	"#", `\#`, "|", `\|`, "~", `\~`, "&", `\&`)
