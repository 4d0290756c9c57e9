// asynq: `work` runs a server, `at` and `paced` schedule tasks (the arguments are those of schedule.py).
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hibiken/asynq"
)

const (
	bytes       = 200
	atOnce      = 1000
	head        = 21
	shortestMs  = 2000
	longestMs   = 6000
	clients     = 50
	concurrency = 100
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func work(redis asynq.RedisConnOpt) {
	file, err := os.OpenFile(os.Getenv("BENCH_EXECUTIONS"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	must(err)
	server := asynq.NewServer(redis, asynq.Config{
		Concurrency:              concurrency,
		TaskCheckInterval:        200 * time.Millisecond,
		DelayedTaskCheckInterval: 100 * time.Millisecond,
		RetryDelayFunc:           func(int, error, *asynq.Task) time.Duration { return time.Second },
		LogLevel:                 asynq.ErrorLevel,
	})
	mux := asynq.NewServeMux()
	mux.HandleFunc("execute", func(_ context.Context, task *asynq.Task) error {
		// One system call for each execution: with a buffer, a killed worker would lose what it executed.
		_, err := fmt.Fprintf(file, "%s %013d\n", task.Payload()[:head], time.Now().UnixMilli())
		return err
	})
	must(server.Run(mux))
}

func delayMs(number int) int64 {
	// A prime: tasks that are scheduled together are due far apart.
	return shortestMs + int64(number*7919%1000*(longestMs-shortestMs)/1000)
}

func enqueue(client *asynq.Client, number int, dueMs int64) {
	message := fmt.Sprintf("%07d %013d ", number, dueMs)
	message += strings.Repeat(".", bytes-len(message))
	_, err := client.Enqueue(asynq.NewTask("execute", []byte(message)), asynq.ProcessAt(time.UnixMilli(dueMs)))
	must(err)
}

func enqueueAll(client *asynq.Client, first int, dues []int64) {
	var group sync.WaitGroup
	for worker := range clients {
		group.Go(func() {
			for at := worker; at < len(dues); at += clients {
				enqueue(client, first+at, dues[at])
			}
		})
	}
	group.Wait()
}

func cpuSeconds() float64 {
	var usage syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}

func schedule(redis asynq.RedisConnOpt, kind string, first, count, third int) {
	client := asynq.NewClient(redis)
	defer client.Close()
	began, cpu, sent := time.Now(), cpuSeconds(), 0
	for sent < count {
		passed := count
		if kind == "paced" {
			passed = int(time.Since(began).Seconds() * float64(third))
		}
		ready := min(count, passed, sent+atOnce)
		if ready == sent {
			time.Sleep(5 * time.Millisecond)
			continue
		}
		now, dues := time.Now().UnixMilli(), make([]int64, ready-sent)
		for at := range dues {
			dues[at] = int64(third)
			if kind == "paced" {
				dues[at] = now + delayMs(sent+at)
			}
		}
		enqueueAll(client, first+sent, dues)
		sent = ready
	}
	answer := map[string]float64{"seconds": time.Since(began).Seconds(), "cpu_s": cpuSeconds() - cpu}
	must(json.NewEncoder(os.Stdout).Encode(answer))
}

func main() {
	redis, err := asynq.ParseRedisURI(os.Getenv("BENCH_REDIS_URL"))
	must(err)
	if os.Args[1] == "work" {
		work(redis)
		return
	}
	var numbers [3]int
	for at := range numbers {
		numbers[at], err = strconv.Atoi(os.Args[2+at])
		must(err)
	}
	schedule(redis, os.Args[1], numbers[0], numbers[1], numbers[2])
}
