/* queue.pml - the hand-over: nobody is left waiting, nobody is let in twice: docs/protocol.md,
 * sections 1.2, 2 and 4.
 *
 * Modelled: one node with vote and queue, and three claims. Each asks (VOTE, which parks it where
 * it is BUSY), waits, is woken, asks again, holds, unlocks, or withdraws at any moment: before
 * its answer, while it waits, between the reservation and its vote. Requests, answers and
 * wake-ups are separate messages, each of them any time on its way: a wake-up may overtake the
 * answer BUSY, a RELEASE the VOTE that it ends. Processes die.
 *
 * Abstracted: stamps and tokens (tokens.pml has queue and reservations too) and validity (timed.pml);
 * a tombstone is a flag. A timer is a claim that may ask again at any time. A holder's vote does
 * not end by itself; that of the dead does. One node: that a claim has lost a split vote is its own
 * choice here (LOSERS); the owner under which it goes on is not told apart from the one before, so their
 * messages do not overtake each other (tokens.pml, NEXT, has that).
 *
 * Checked:  G3     one claim holds at a time
 *           STALL  without a fault nobody depends on a timer: where nothing is on its way and
 *                  nobody holds, nobody waits
 *           HANG   with faults, where nothing is on its way and nobody holds, somebody who waits
 *                  has a timer
 *           PLACE  (without LOSS) where nothing is on its way, who waits has a place or the vote
 *
 * Three claims, in the order of their births.
 * -DDEATHS= processes that may die   -DLOSS  wake-ups get lost, reservations end before they are followed
 * -DLOSERS  a claim whose vote was accepted may have lost all the same, once: it gives the vote back by
 *           RELEASE with next, which wakes nobody (the winner's will, at other nodes), and waits
 * -DDIRECT  a wake-up is a grant by itself while the reservation stands (until when is timed.pml's subject), if the
 *           claim can count it; it may also have to ask
 *
 * Mutants (NOTHELD, ANSWER and NOPLACE are mistakes of protocol.md, section 9):
 *   MUT_NOTHELD    a claim that withdraws says held = false, so its reservation is handed to nobody
 *   MUT_HELDKNOWN  held only where the claim was told that it is parked: its answer may be on its way
 *   MUT_ANSWER     a wake-up for a claim that does not wait is answered by RELEASE
 *   MUT_NOPLACE    (LOSERS) the RELEASE of a loser parks it nowhere
 *   MUT_FORGET     a wake-up that comes before the answer BUSY is ignored
 *   MUT_NOCOUNT    the node does not look at PUBLISH's count: it reserves for the dead
 *   MUT_DIDLE      (DIRECT) a claim that cannot count a message does not ask either
 *   MUT_ONETIMER   a claim has a timer after its first answer only
 */
#define K 3
#ifndef DEATHS
#define DEATHS 0
#endif

/* Always false: they name, in the message of a violation, what was violated. */
bool G3, STALL, HANG, PLACE;
#define CHECK(name, holds) assert(name || (holds))

#define OUT 0           /* not begun */
#define ASKING 1        /* a VOTE, or its answer, is on its way */
#define PARKED 2        /* waiting */
#define HOLDS 3
#define GONE 4          /* RELEASE sent */
#define DEAD 5

#define NONE 255
#define OK 1
#define BUSY 2

byte vote = NONE;       /* the claim that has it */
bool reserved;          /* it is a reservation */
bool queue[K];          /* who has a place */
bool released[K];       /* tombstones */

byte state[K];
bool voting[K];         /* on its way: a VOTE */
byte answer[K];         /*             its answer */
bool releasing[K];      /*             a RELEASE, */
bool held[K];           /*             and what it says, */
bool next[K];           /*             and whether the claim goes on */
bool waking[K];         /*             a wake-up */
bool woken[K];          /* a wake-up came before the answer */
bool parked[K];         /* the claim was told that it is parked */
bool timer[K];
bool lost[K];
bool fault;             /* something happened that only a timer mends */
byte deaths;

/* The vote goes to the first who lives. PUBLISH counts the receivers. */
inline handOver() {
    i = 0;
    do
    :: i < K && queue[i] ->
        queue[i] = false;
        if
#ifndef MUT_NOCOUNT
        :: state[i] == DEAD -> skip
#endif
        :: else -> printf("@ the node reserves for claim %d\n", i); vote = i; reserved = true; waking[i] = (state[i] != DEAD); break
        fi;
        i++
    :: i < K && !queue[i] -> i++
    :: i == K -> break
    od;
    i = 0
}

inline executeVOTE(c) {
    voting[c] = false;
    printf("@ the node executes VOTE of claim %d\n", c);
    if
    :: released[c] -> skip                              /* LOW: nobody waits for the answer */
    :: !released[c] && (vote == NONE || vote == c) -> vote = c; reserved = false; queue[c] = false; answer[c] = OK
    :: else -> queue[c] = true; answer[c] = BUSY
    fi
}

inline executeRELEASE(c) {
    releasing[c] = false; released[c] = !next[c];
#ifdef MUT_NOPLACE
    queue[c] = false;
#else
    queue[c] = next[c];
#endif
    next[c] = false;
    printf("@ the node executes RELEASE of claim %d, held=%d\n", c, held[c]);
    if
    :: vote == c ->
        vote = NONE; reserved = false;
        if
        :: held[c] -> handOver()
        :: else
        fi
    :: else
    fi
}

inline ask(c) { printf("@ claim %d sends VOTE\n", c); state[c] = ASKING; voting[c] = true; timer[c] = false; woken[c] = false }

inline sendRELEASE(c, h) { printf("@ claim %d sends RELEASE\n", c); releasing[c] = true; held[c] = h }

inline alone(c) {
    i = 0;
    do
    :: i < K -> CHECK(G3, i == c || state[i] != HOLDS); i++
    :: i == K -> break
    od;
    i = 0
}

#ifdef MUT_NOTHELD
#define WITHDRAWN(c) false
#elif defined(MUT_HELDKNOWN)
#define WITHDRAWN(c) parked[c]
#else
#define WITHDRAWN(c) true       /* it asked for a place */
#endif

active [K] proctype Claim() {
    byte i;
    byte me = _pid;
end:
    do
    /* the node */
    :: d_step { voting[me] && !next[me] -> executeVOTE(me) }
    :: d_step { releasing[me] -> executeRELEASE(me) }
    :: d_step { vote == me && state[me] == DEAD -> vote = NONE; reserved = false }

    /* the claim */
    :: d_step { state[me] == OUT -> ask(me) }
    :: d_step { answer[me] == OK ->
        answer[me] = 0;
        if
        :: state[me] == ASKING ->
            alone(me);
            printf("@ claim %d holds\n", me); state[me] = HOLDS; woken[me] = false
        :: else
        fi }
#ifdef LOSERS
    :: d_step { answer[me] == OK && state[me] == ASKING && !lost[me] ->
        answer[me] = 0; lost[me] = true; fault = true;
        printf("@ claim %d has lost\n", me);
        state[me] = PARKED; parked[me] = true; timer[me] = true; woken[me] = false;
        next[me] = true; sendRELEASE(me, false) }
#endif
    :: d_step { answer[me] == BUSY ->
        answer[me] = 0;
        if
        :: state[me] == ASKING && woken[me] -> parked[me] = true; ask(me)
        :: state[me] == ASKING && !woken[me] ->
            printf("@ claim %d waits\n", me); state[me] = PARKED;
#ifdef MUT_ONETIMER
            timer[me] = !parked[me];
#else
            timer[me] = true;
#endif
            parked[me] = true
        :: else
        fi }
    :: d_step { timer[me] && state[me] == PARKED -> ask(me) }
    :: d_step { waking[me] ->
        waking[me] = false; printf("@ claim %d is woken\n", me);
        if
#ifndef MUT_DIDLE
        :: state[me] == PARKED -> ask(me)
#endif
#ifndef MUT_FORGET
        :: state[me] == ASKING -> woken[me] = true
#endif
#ifdef MUT_ANSWER
        :: state[me] == HOLDS -> sendRELEASE(me, true)
#endif
        :: else
        fi }
#ifdef DIRECT
    :: d_step { waking[me] && vote == me && reserved && (state[me] == PARKED || state[me] == ASKING) ->
        waking[me] = false; reserved = false; timer[me] = false; woken[me] = false;
        alone(me); printf("@ claim %d is woken, and holds\n", me); state[me] = HOLDS }
#endif
    :: d_step { state[me] == HOLDS -> state[me] = GONE; sendRELEASE(me, true) }
    :: d_step { (state[me] == ASKING || state[me] == PARKED) && !next[me] -> state[me] = GONE; timer[me] = false; sendRELEASE(me, WITHDRAWN(me)) }

    /* faults */
#if DEATHS > 0
    :: d_step { deaths < DEATHS && (state[me] == ASKING || state[me] == PARKED || state[me] == HOLDS) ->
        deaths++; printf("@ the process of claim %d dies\n", me);
        /* Who holds, or may be given the vote, blocks it until it ends. */
        if
        :: vote == me || voting[me] -> fault = true
        :: else
        fi;
        state[me] = DEAD; timer[me] = false; waking[me] = false; answer[me] = 0 }
#endif
#ifdef LOSS
    :: d_step { waking[me] -> printf("@ a wake-up of claim %d is lost\n", me); waking[me] = false; fault = true }
    :: d_step { vote == me && reserved -> printf("@ the reservation of claim %d ends\n", me); vote = NONE; reserved = false; fault = true }
#endif
    od
}

#define ANY(f) (f(0) || f(1) || f(2))
#define MOVES(c) (voting[c] || answer[c] != 0 || releasing[c] || waking[c])
#define STIRS(c) (MOVES(c) || state[c] == HOLDS)
#define WAITS(c) (state[c] == PARKED)
#define STRAY(c) (state[c] == PARKED && !queue[c] && vote != c)
#define TIMED(c) (state[c] == PARKED && timer[c])

active proctype Watch() {
end:
    do
    :: d_step { !fault && !ANY(STIRS) && ANY(WAITS) -> CHECK(STALL, false) }
    :: d_step { fault && !ANY(STIRS) && ANY(WAITS) && !ANY(TIMED) -> CHECK(HANG, false) }
#ifndef LOSS
    :: d_step { !ANY(MOVES) && ANY(STRAY) -> CHECK(PLACE, false) }
#endif
    od
}
