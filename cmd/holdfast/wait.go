package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

const (
	reportAfter  = time.Second      // of waiting, and then whenever the reason changes
	repeatAfter  = 10 * time.Second // also where it does not
	inspectLimit = time.Second      // for the store to say who holds the key
	clearLimit   = 100 * time.Millisecond
)

// teller tells of a wait: on a terminal in one line that is rewritten, else in a line now
// and then.
type teller struct {
	r     *reporter
	began time.Time
	asker *asker // nil where there is no terminal
	still bool   // nobody waits: it is not told how long an answer takes

	last string // sort of the reason that was told last
	told time.Time
}

func (t *teller) tell() {
	defer close(t.r.told)
	var ticks <-chan time.Time
	if !t.still {
		ticker := time.NewTicker(reportAfter)
		defer ticker.Stop()
		ticks = ticker.C
	}
	var first <-chan struct{}
	if t.r.json { // people need not know before the first tick
		first = t.r.waits
	}
	for {
		select {
		case <-t.r.acquired:
			t.clear()
			return
		case <-first:
			first = nil
			t.line(time.Now())
		case now := <-ticks:
			if t.asker != nil && stderr.inForeground() {
				t.progress(now)
			} else {
				t.line(now)
			}
		}
	}
}

// line tells the reason where it is new, or has not been told for long.
func (t *teller) line(now time.Time) {
	text, sort := t.r.reason()
	if sort == t.last && now.Sub(t.told) < repeatAfter {
		return
	}
	t.last, t.told = sort, now
	waited := now.Sub(t.began)
	rec := record{Event: "waiting", Waited: waited.Seconds(), Error: text}
	if held := t.r.held(); held != nil {
		h := held.Holder
		rec.Holder = &holderRecord{Label: h.Label, Token: h.Token, TTL: h.TTL.Seconds()}
		if h.Held > 0 {
			rec.Holder.Since = unixTime(now.Add(-h.Held))
		}
	}
	if advice := t.r.advice(); advice != "" {
		text += "; " + advice
	}
	t.r.tell(rec, fmt.Sprintf("waiting for %q since %v: %s", t.r.key, waited.Round(time.Second), text))
}

// progress rewrites the line on the terminal.
func (t *teller) progress(now time.Time) {
	t.asker.ask()
	text, _ := t.r.reason()
	if held := t.r.held(); held != nil {
		text = holderText(t.asker.best(held.Holder))
	}
	text = fmt.Sprintf("holdfast: waiting for %s since %v: %s", shortKey(t.r.key), now.Sub(t.began).Round(time.Second), text)
	stderr.progress(ascii(text, stderr.width()-1))
}

// clear takes the line away before CMD writes to the same terminal.
func (t *teller) clear() {
	if t.asker != nil {
		t.asker.stop()
		stderr.progress("")
		stderr.flushWithin(clearLimit)
	}
}

// holderText says who holds a key, and since when.
func holderText(h store.Holder) string {
	if h.Held == 0 {
		return (&store.HeldError{Holder: h}).Error()
	}
	h.TTL, h.Session = 0, false
	return fmt.Sprintf("%v since %s (%v)", &store.HeldError{Holder: h}, time.Now().Add(-h.Held).Format(time.TimeOnly), h.Held.Round(time.Second))
}

// asker asks the store who holds a key, one question at a time, and delays nobody: an
// answer is there or not.
type asker struct {
	inspector store.Inspector // nil where the store cannot tell
	key       string

	mu     sync.Mutex
	asks   bool // a question is under way
	cancel context.CancelFunc
	answer *store.Holder // the last one; nil where there was none
	at     time.Time     // when it came
}

func (a *asker) ask() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.inspector == nil || a.asks {
		return
	}
	var ctx context.Context
	ctx, a.cancel = context.WithTimeout(context.Background(), inspectLimit)
	a.asks = true
	go func() {
		h, err := a.inspector.Inspect(ctx, a.key)
		a.mu.Lock()
		defer a.mu.Unlock()
		a.cancel()
		a.asks, a.answer, a.at = false, &h, time.Now()
		if err != nil {
			a.answer = nil
		}
	}()
}

func (a *asker) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cancel != nil {
		a.cancel()
	}
}

// best returns what the store answered last, where it named a holder, else h.
func (a *asker) best(h store.Holder) store.Holder {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.answer == nil || a.answer.Owner == "" {
		return h
	}
	h = *a.answer
	if h.Held > 0 {
		h.Held += time.Since(a.at)
	}
	return h
}

// shortKey quotes a key for a line that must be short.
func shortKey(key string) string {
	if len(key) > 40 {
		return strconv.Quote(key[:37]) + "..."
	}
	return strconv.Quote(key)
}

// ascii makes a text as wide as it is long, and cuts it.
func ascii(text string, width int) string {
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, text)
	return text[:min(len(text), max(0, width))]
}
