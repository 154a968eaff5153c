package main

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// say tells people something, in one line. It goes to stderr: stdout is the command's. It
// does not wait until it is written.
func say(format string, args ...any) {
	text := strings.TrimPrefix(fmt.Sprintf(format, args...), "holdfast: ") // the library's errors have it too
	stderr.say("holdfast: " + oneLine.Replace(text))
}

var oneLine = strings.NewReplacer("\n", `\n`, "\r", `\r`)

// writer writes lines in the background: a reader that stands still, such as a terminal
// that was stopped, must not hold up the end of a command whose lease is lost.
type writer struct {
	to    *os.File
	begin sync.Once
	lines chan line
}

// line is a line to write, or none and who waits until those before are written.
type line struct {
	text     string
	progress bool // the next line takes its place; an empty text only removes it
	flushed  chan struct{}
}

var stderr = &writer{to: os.Stderr, lines: make(chan line, 64)}

// flushLimit bounds how long the end of the program waits for a reader.
const flushLimit = 2 * time.Second

func (w *writer) say(text string) { w.put(line{text: text}) }

// progress shows a line of ASCII on a terminal, until something else is written. The text
// must fit into the terminal's width.
func (w *writer) progress(text string) { w.put(line{text: text, progress: true}) }

func (w *writer) put(l line) {
	w.begin.Do(func() { go w.write() })
	select {
	case w.lines <- l:
	default: // nobody has read for long
	}
}

func (w *writer) write() {
	shown := 0 // length of the line of progress on the terminal
	for l := range w.lines {
		if l.flushed != nil {
			close(l.flushed)
			continue
		}
		text := l.text
		if shown > 0 {
			text = "\r" + text + strings.Repeat(" ", max(0, shown-len(text)))
		}
		switch {
		case !l.progress:
			text, shown = text+"\n", 0
		case l.text == "" && shown == 0:
			continue
		case l.text == "":
			text, shown = text+"\r", 0
		default:
			shown = len(l.text)
		}
		fmt.Fprint(w.to, text)
	}
}

// flush waits until all is written.
func (w *writer) flush() { w.flushWithin(flushLimit) }

func (w *writer) flushWithin(d time.Duration) {
	w.begin.Do(func() { go w.write() })
	limit := time.After(d)
	flushed := make(chan struct{})
	select {
	case w.lines <- line{flushed: flushed}:
	case <-limit:
		return
	}
	select {
	case <-flushed:
	case <-limit:
	}
}

func (w *writer) isTerminal() bool { return term.IsTerminal(int(w.to.Fd())) }

// width is that of the terminal, in columns.
func (w *writer) width() int {
	width, _, err := term.GetSize(int(w.to.Fd()))
	if err != nil || width <= 0 {
		return 80
	}
	return width
}
