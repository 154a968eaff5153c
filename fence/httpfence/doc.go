// Package httpfence makes fencing tokens count at a service over HTTP.
//
// The holder of a lease sends its token with every request, as the header [Header], and the
// service refuses a token below the highest that it has seen for the resource. On the holder's
// side [Transport] adds the header from the context, and ends the lease when the service answers
// that the token is stale:
//
//	client := &http.Client{Transport: &httpfence.Transport{}}
//	req, err := http.NewRequestWithContext(lease.Context(ctx), "PUT", url, body)
//	resp, err := client.Do(req)
//
// On the service's side there are three ways, from the strongest to the weakest:
//
//   - The handler's own transaction checks the token: [Middleware] without a gate hands it on,
//     and a guard such as package sqlfence's makes the check a part of the write. It holds for
//     any number of instances of the service and under any pause.
//   - [Middleware] with a [Gate] checks before the handler, and keeps requests of a lower token
//     and a higher one apart. It holds for a service that is one process, and not beyond: a
//     check before the handler is no fence for other instances.
//   - A [Gateway], which is a Gate and a reverse proxy, stands before a service that knows
//     nothing of tokens. It holds for what goes through it and is answered; what it cannot know
//     is said there. Holdfast's command has it as "holdfast gateway", with marks on disk.
//
// Refusals are problem+json (RFC 9457): 412 with the type urn:holdfast:stale-token, which no
// client may try again, 428 (RFC 6585) where the token is missing, and the others of
// [WriteError]. [ReadError] turns them into the errors of package fence again.
//
// A holder claims before its first read: a request that changes nothing, with the token, is
// enough, because a safe request that carries a token is guarded too.
package httpfence
