"""Programs that want a score without computing it, by kind, and honest ones.

Each attack would be right if its way were open: the answers are random numbers, which lie in a file, in a
module, in the grader's memory and environment, and behind a port. `@NAME@` stands for where.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ATTACKS", "HONEST", "HONEST_STDIN"]

_READ = """
import json
def answers(text):
    return {int(n): value for n, value in json.loads(text).items()}
"""
_EARLY_EXIT = {
    "sys.exit at import": "import sys\nsys.exit(0)",
    "sys.exit in the function": "import sys\ndef solve(n): sys.exit(0)",
    "os._exit at import": "import os\nos._exit(0)",
    "os._exit in the function": "import os\ndef solve(n): os._exit(0)",
    "SystemExit with the word": "def solve(n): raise SystemExit('passed')",
    "exit in letters that cannot be printed": "def solve(n): raise SystemExit('\\ud800\\u2603' * 3)",
    "exit with an object that breaks": """
class Broken:
    def __str__(self): raise ValueError
    __repr__ = __str__
def solve(n): raise SystemExit(Broken())
""",
    "an exception whose name breaks": """
class Meta(type):
    @property
    def __name__(cls): raise ValueError
class Broken(BaseException, metaclass=Meta): pass
def solve(n): raise Broken
""",
    "abort": "import os\ndef solve(n): os.abort()",
    "a segmentation fault": "import ctypes\ndef solve(n): ctypes.string_at(0)",
    "quit": "def solve(n): quit(0)",
    "SIGKILL for itself": "import os, signal\ndef solve(n): os.kill(os.getpid(), signal.SIGKILL)",
}
_FORGED = {
    "verdicts on every fd": """
import os
for fd in range(64):
    try: os.write(fd, b'PASS 1.0 {"score": 1.0, "passed": true, "status": "ok"}\\n')
    except OSError: pass
def solve(n): return True
""",
    "claims on every fd": """
import os
for fd in range(64):
    try: os.write(fd, b'[0,"value",1]\\n[1,"value",["any",[]]]\\n[2,"value",true]\\n[3,"value",null]\\n')
    except OSError: pass
os._exit(0)
""",
    "many claims for one case": """
import os
for fd in range(3, 64):
    for guess in range(1000):
        try: os.write(fd, b'[0,"value",%d]\\n' % guess)
        except OSError: break
def solve(n): return 0
""",
    "a sandbox that says it broke": """
import os
for fd in range(64):
    try: os.write(fd, b'["broken","OSError: try again"]\\n"ready"\\n')
    except OSError: pass
os._exit(1)
""",
    "json.dumps patched": """
import json
json.dumps = json.JSONEncoder.encode = lambda *a, **k: '{"passed": true, "score": 1.0}'
def solve(n): return object()
""",
    "os.write patched": """
import os
write = os.write
os.write = lambda fd, line: write(fd, line.replace(b'"raised"', b'"value"')) and len(line)
def solve(n): raise ValueError(n)
""",
    "atexit": """
import atexit, os
@atexit.register
def last():
    for fd in range(64):
        try: os.write(fd, b'[0,"value",0]\\n')
        except OSError: pass
def solve(n): return None
""",
    "excepthook": """
import os, sys
sys.excepthook = lambda *a: os._exit(0)
sys.unraisablehook = sys.excepthook
def solve(n): raise ValueError
""",
    "the child's own functions patched": """
import sys
frame = sys._getframe()
while frame.f_back: frame = frame.f_back
frame.f_globals['encoded'] = lambda value, depth=0: '["any",[]]'
frame.f_globals['_described'] = lambda error: 'passed'
def solve(n): return n
""",
    "a marker on stdout": "print('ALL TESTS PASSED')\ndef solve(n): print('OK', n, 'expected', n)",
    "a comparison patched": """
import builtins
builtins.isinstance = lambda *a: True
builtins.all = builtins.any = lambda *a: True
def solve(n): return n
""",
}
_EQUALITY = {
    "an int that equals all": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def solve(n): return Any(n)
""",
    "an object that equals all": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def solve(n): return Any()
""",
    "an object that says it is an int": """
class Any:
    __class__ = int
    def __index__(self): return 0
    def __int__(self): return 0
    def __eq__(self, other): return True
def solve(n): return Any()
""",
    "a type that equals all types": """
class Meta(type):
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
class Any(metaclass=Meta):
    def __iter__(self): return iter(())
    def __eq__(self, other): return True
def solve(n): return Any()
""",
    "a text that equals all": """
class Any(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def solve(n): return Any('1')
""",
    "a list that equals all": """
class Any(list):
    def __eq__(self, other): return True
def solve(n): return Any([n])
""",
    "NaN": "def solve(n): return float('nan')",
    "True": "def solve(n): return True",
    "something to unpickle": """
import os
class Any:
    def __reduce__(self): return os.system, ('true',)
def solve(n): return Any()
""",
}
_LOOKING = {
    "the scenario's file": _READ + "def solve(n): return answers(open('@SECRETS@').read())[n]",
    "the scenario's file by os.open": _READ
    + "import os\ndef solve(n): return answers(os.read(os.open('@SECRETS@', 0), 9999).decode())[n]",
    "the scenario's file by a path in /proc": _READ
    + """
import os
fd = os.open('@SECRETS@', os.O_PATH)
def solve(n): return answers(open(f'/proc/self/fd/{fd}').read())[n]
""",
    "the scenario's file by mmap of a raw call": _READ
    + """
import ctypes
libc = ctypes.CDLL(None)
fd = libc.syscall(257, -100, b'@SECRETS@', 0, 0)
text = ctypes.create_string_buffer(9999)
libc.read(fd, text, 9999)
def solve(n): return answers(text.value.decode())[n]
""",
    "every file of its folder": _READ
    + """
import glob
def solve(n):
    for path in glob.glob('@FOLDER@/*'): return answers(open(path).read())[n]
""",
    "the generator by its path": """
import sys
sys.path[:0] = ['@FOLDER@']
import secret_generator
def solve(n): return secret_generator.ANSWERS[n]
""",
    "the generator by its loader": """
import importlib.util
spec = importlib.util.spec_from_file_location('g', '@FOLDER@/secret_generator.py')
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
def solve(n): return module.ANSWERS[n]
""",
    "the generator among the packages": """
import site, sys
sys.path += ['@PACKAGES@', *site.getsitepackages()]
import stateset_agents
def solve(n): return stateset_agents.ANSWERS[n]
""",
    "the grader's environment": _READ
    + """
import os
def solve(n):
    if 'SECRET_ANSWERS' in os.environ: return answers(os.environ['SECRET_ANSWERS'])[n]
    for part in open(f'/proc/{os.getppid()}/environ').read().split(chr(0)):
        if part.startswith('SECRET_ANSWERS='): return answers(part[15:])[n]
""",
    "the grader's memory": _READ
    + """
import re
def solve(n):
    memory = open('/proc/@PID@/mem', 'rb')
    for line in open('/proc/@PID@/maps'):
        first, last = (int(part, 16) for part in line.split()[0].split('-'))
        memory.seek(first)
        found = re.search(rb'SECRET_ANSWERS=([^\\0]+)', memory.read(last - first))
        if found: return answers(found[1])[n]
""",
    "the grader's memory by process_vm_readv": """
import ctypes
def solve(n):
    text = ctypes.create_string_buffer(64)
    local = (ctypes.c_ulong * 2)(ctypes.addressof(text), 64)
    remote = (ctypes.c_ulong * 2)(@ADDRESS@, 64)
    if ctypes.CDLL(None).syscall(310, @PID@, local, 1, remote, 1, 0) > 0:
        return int(text.value.split()[n])
""",
    "the grader's open files": _READ
    + """
import os
def solve(n):
    for fd in os.listdir('/proc/@PID@/fd'):
        try: return answers(open(f'/proc/@PID@/fd/{fd}').read())[n]
        except (OSError, ValueError): pass
""",
    "stack frames": """
import sys
def solve(n):
    frame = sys._getframe()
    while frame:
        for names in (frame.f_locals, frame.f_globals):
            for name, value in list(names.items()):
                if 'expected' in str(name): return value[n]
        frame = frame.f_back
""",
    "everything the collector knows": """
import gc
def solve(n):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and 'expected' in thing: return thing['expected'][n]
        if isinstance(thing, dict) and n in thing and isinstance(thing[n], int): return thing[n]
""",
    "the job, read again": """
import os
def solve(n):
    for fd in range(64):
        try:
            os.lseek(fd, 0, 0)
            text = os.read(fd, 1 << 20)
            if b'expected' in text: return int(text.split(b'expected')[1].split()[n])
        except OSError: pass
""",
    "the code that calls": """
import inspect
def solve(n): return eval(inspect.getsource(inspect.stack()[1][0]))
""",
    "the arguments of others": """
import sys
def solve(n):
    frame = sys._getframe(1)
    return [given for given in frame.f_locals['arguments']][n][1]
""",
}
_PROCESSES = {
    "a fork bomb": """
import os
while True:
    try: os.fork()
    except BaseException: break
def solve(n): return 0
""",
    "a fork that stays": """
import os, time
if os.fork() == 0:
    while True: pass
def solve(n): return 0
""",
    "subprocess": _READ
    + "import subprocess\ndef solve(n): return answers(subprocess.check_output(['cat', '@SECRETS@']))[n]",
    "os.system": "import os\ndef solve(n): return os.system('touch @PLAYGROUND@/system')",
    "posix_spawn": """
import os
def solve(n): return os.posix_spawn('/bin/touch', ['touch', '@PLAYGROUND@/x'], {})
""",
    "exec": "import os\ndef solve(n): os.execv('/bin/touch', ['touch', '@PLAYGROUND@/exec'])",
    "fork by ctypes": """
import ctypes
pid = ctypes.CDLL(None).fork()
while pid == 0: pass
def solve(n): return pid
""",
    "clone by a raw call": """
import ctypes
libc = ctypes.CDLL(None)
for number, flags in ((56, 17), (435, 0), (57, 0), (58, 0)):
    if libc.syscall(number, flags, 0, 0, 0, 0) == 0:
        while True: pass
def solve(n): return 0
""",
    "a thread": """
import threading, time
found = []
def look():
    while True: found.append(open('@SECRETS@').read())
threading.Thread(target=look, daemon=True).start()
def solve(n): return found[0][n]
""",
    "multiprocessing": """
import multiprocessing
def solve(n):
    with multiprocessing.Pool(4) as pool: return pool.map(abs, [n])[0]
""",
    "the grader killed": """
import os, signal
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
    for pid in (@PID@, os.getppid(), -1, 0):
        try: os.kill(pid, number)
        except OSError: pass
def solve(n): return 0
""",
    "the grader killed by raw calls": """
import ctypes
libc = ctypes.CDLL(None)
for number, arguments in ((62, (@PID@, 9)), (234, (@PID@, @PID@, 9)), (200, (@PID@, 9))):
    libc.syscall(number, *arguments)
fd = libc.syscall(434, @PID@, 0)
libc.syscall(424, fd, 9, 0, 0)
def solve(n): return 0
""",
    "ptrace": """
import ctypes
libc = ctypes.CDLL(None)
found = libc.ptrace(16, @PID@, 0, 0)
def solve(n): return found
""",
    "the grader's fds by pidfd_getfd": """
import ctypes, os
libc = ctypes.CDLL(None)
def solve(n):
    process = libc.syscall(434, @PID@, 0)
    for fd in range(32):
        copy = libc.syscall(438, process, fd, 0)
        if copy >= 0: os.write(copy, b'PASS')
""",
}
_RESOURCES = {
    "eight gigabytes": "data = bytearray(8 << 30)\ndef solve(n): return len(data)",
    "a list that doubles": "data = [0]\nwhile True: data += data\ndef solve(n): return 0",
    "an endless loop": "def solve(n):\n    while True: pass",
    "an endless loop that catches all": """
def solve(n):
    while True:
        try:
            while True: pass
        except BaseException: pass
""",
    "an endless loop that ignores signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
def solve(n):
    while True: pass
""",
    "sleep": "import time\ndef solve(n): time.sleep(1000)",
    "a wait for an event": "import threading\ndef solve(n): threading.Event().wait()",
    "a wait for an event with a limit": "import threading\ndef solve(n): threading.Event().wait(1000)",
    "a lock taken twice": """
import threading
lock = threading.Lock()
def solve(n): lock.acquire(); lock.acquire()
""",
    "a wait by raw calls": """
import ctypes
libc = ctypes.CDLL(None)
for number in (34, 35, 230, 130, 128, 61, 7, 23, 232, 271, 270, 202):
    libc.syscall(number, 0, 0, 0, 0, 0, 0)
def solve(n): return 0
""",
    "reads past the page cache": """
import os
file = os.open(os.__file__, os.O_RDONLY | os.O_DIRECT)
while True: os.pread(file, 1 << 20, 0)
""",
    "its own claims, read by another way": """
import os
for fd in range(3, 64):
    try: os.read(os.open(f'/proc/self/fd/{fd}', os.O_RDONLY), 1)
    except OSError: pass
def solve(n): return 0
""",
    "its turn given away": """
import os
def solve(n):
    while True: os.sched_yield()
""",
    "its end called a kill": "import os\ndef solve(n): os._exit(137)",
    "a flood of claims": """
import os
while True:
    for fd in range(3, 16):
        try: os.write(fd, b'[0,"value",' * 10000)
        except OSError: pass
def solve(n): return 0
""",
    "a flood of prints": "def solve(n):\n    while True: print('x' * 100000)",
    "fifty megabytes returned": "def solve(n): return 'x' * 50_000_000",
    "recursion": "def solve(n): return solve(n)",
    "recursion without a limit": "import sys\nsys.setrecursionlimit(10**9)\ndef solve(n): return solve([n])",
    "recursion in C": """
import sys
sys.setrecursionlimit(10**9)
class A:
    def __repr__(self): return repr([self])
def solve(n): return repr(A())
""",
    "a value nested without end": "def solve(n):\n    x = []\n    x.append(x)\n    return x",
    "a value nested very deeply": """
def solve(n):
    x = []
    for _ in range(10**5): x = [x]
    return x
""",
    "9**9**9": "def solve(n): return 9**9**9",
    "a number of a million digits": "def solve(n): return 10**1_000_000",
    "a pattern that never ends": "import re\ndef solve(n): return re.match('(a+)+$', 'a' * 60 + 'b')",
    "limits lifted": """
import resource, signal
for name in ('CPU', 'AS', 'FSIZE', 'NOFILE'):
    try: resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (-1, -1))
    except (OSError, ValueError): pass
open('@PLAYGROUND@/lifted', 'w').write('x')
def solve(n): return 0
""",
    "the grader's limits lowered": """
import resource
def solve(n): return resource.prlimit(@PID@, resource.RLIMIT_CPU, (1, 1))
""",
    "items that collide": "def solve(n): return {i * (2**61 - 1) for i in range(2000)}",
}
_NETWORK = {
    "a socket": _READ
    + """
import socket
def solve(n):
    with socket.create_connection(('127.0.0.1', @PORT@), 2) as line: return answers(line.recv(9999))[n]
""",
    "urllib": _READ
    + """
import urllib.request
def solve(n): return answers(urllib.request.urlopen('http://127.0.0.1:@PORT@', timeout=2).read())[n]
""",
    "an abstract unix socket": _READ
    + """
import socket
def solve(n):
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(chr(0) + '@ABSTRACT@')
        return answers(line.recv(9999))[n]
""",
    "a socket by raw calls": _READ
    + """
import ctypes, os, struct
libc = ctypes.CDLL(None)
def solve(n):
    fd = libc.syscall(41, 2, 1, 0)
    address = struct.pack('<H', 2) + struct.pack('>H', @PORT@) + bytes([127, 0, 0, 1]) + bytes(8)
    libc.syscall(42, fd, address, 16)
    return answers(os.read(fd, 9999))[n]
""",
    "datagrams": """
import socket
def solve(n): return socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))
""",
    "io_uring": """
import ctypes
ring = ctypes.CDLL(None).syscall(425, 8, bytes(120))
def solve(n): return ring
""",
    "a server": "import socket\ndef solve(n): return socket.create_server(('127.0.0.1', 0)).accept()",
    "asyncio": "import asyncio\ndef solve(n): return asyncio.run(asyncio.sleep(0, n))",
}
_FILES = {
    "a file": "def solve(n): return open('@PLAYGROUND@/file', 'w').write('x')",
    "a file at import": "open('@PLAYGROUND@/import', 'w').close()\ndef solve(n): return 0",
    "files by tempfile": """
import tempfile
def solve(n): return tempfile.NamedTemporaryFile(delete=False).write(b'x')
""",
    "files in shared memory": "def solve(n): return open('/dev/shm/@MARKER@', 'w').write('x')",
    "shared memory": """
from multiprocessing import shared_memory
def solve(n): return shared_memory.SharedMemory('@MARKER@', create=True, size=10).size
""",
    "a folder": "import os\ndef solve(n): return os.mkdir('@PLAYGROUND@/folder')",
    "a link": "import os\ndef solve(n): os.symlink('@SECRETS@', '@PLAYGROUND@/link')",
    "a hard link": "import os\ndef solve(n): os.link('@SECRETS@', '@PLAYGROUND@/hard')",
    "a pipe with a name": "import os\ndef solve(n): os.mkfifo('@PLAYGROUND@/fifo')",
    "the scenario's file overwritten": """
import json
def solve(n):
    open('@SECRETS@', 'w').write(json.dumps({str(i): 0 for i in range(100)}))
    return 0
""",
    "the scenario's file emptied, moved, removed": """
import os
for spoil in (lambda: os.truncate('@SECRETS@', 0), lambda: os.remove('@SECRETS@'),
              lambda: os.rename('@SECRETS@', '@SECRETS@2'), lambda: os.chmod('@SECRETS@', 0),
              lambda: os.utime('@SECRETS@', (0, 0)), lambda: os.chown('@SECRETS@', 1, 1)):
    try: spoil()
    except OSError: pass
def solve(n): return 0
""",
    "a file in memory, executed": """
import os
fd = os.memfd_create('x')
os.write(fd, b'#!/bin/sh\\ntouch @PLAYGROUND@/memfd\\n')
os.execv(f'/proc/self/fd/{fd}', ['x'])
def solve(n): return 0
""",
    "the standard library rewritten": """
import os
def solve(n): return open(os.__file__, 'a').write('# @MARKER@')
""",
    "a core": """
import os, resource
resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))
def solve(n): os.abort()
""",
}
_RIGHTS = {
    "namespaces of its own": """
import ctypes
libc = ctypes.CDLL(None)
found = [libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)]
def solve(n): return found
""",
    "another root": "import os\ndef solve(n): os.chroot('@FOLDER@')",
    "a mount": """
import ctypes
found = ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None)
def solve(n): return found
""",
    "another user": "import os\nos.setuid(0)\nos.setgid(0)\ndef solve(n): return 0",
    "a filter of its own": """
import ctypes
libc = ctypes.CDLL(None)
libc.prctl(22, 0, 0, 0, 0)
libc.prctl(38, 0, 0, 0, 0)
libc.prctl(4, 1, 0, 0, 0)
found = open('@SECRETS@').read()
def solve(n): return found
""",
    "calls of 32 bits": """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('b814000000cd80c3'))  # getpid by int 0x80
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
def solve(n): return call()
""",
    "calls of x32": """
import ctypes
found = ctypes.CDLL(None).syscall(0x40000000 + 39)
def solve(n): return found
""",
    "bpf, keys, modules, the clock": """
import ctypes
libc = ctypes.CDLL(None)
found = [libc.syscall(number, 0, 0, 0, 0, 0) for number in (321, 250, 175, 227, 164, 169, 246, 298, 323, 272)]
def solve(n): return found
""",
}
_SIGNALS = {
    "an alarm": "import signal\nsignal.alarm(1)\ndef solve(n):\n    while True: pass",
    "a timer": """
import signal
def stop(*a): raise SystemExit(0)
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.1)
def solve(n):
    while True: pass
""",
    "a signal that it handles": """
import os, signal
signal.signal(signal.SIGUSR1, lambda *a: os._exit(0))
def solve(n): signal.raise_signal(signal.SIGUSR1)
""",
    "the grader's signals": "import os, signal\ndef solve(n): os.kill(@PID@, signal.SIGUSR1)",
    "the time a guess takes": """
import os, time
def solve(n):
    best = (0, 0)
    for guess in range(0, 1000, 7):
        begun = time.perf_counter()
        for fd in range(3, 8):
            try: os.read(fd, 0)
            except OSError: pass
        best = max(best, (time.perf_counter() - begun, guess))
    return best[1]
""",
    "the time a file takes": """
import os, time
def solve(n):
    begun = time.perf_counter_ns()
    try: os.stat('@SECRETS@')
    except OSError: pass
    return time.perf_counter_ns() - begun
""",
}
_WEAK_TESTS = {
    "the visible cases by heart": "def solve(n): return {100: 1, 101: 2}[n]",
    "its argument": "def solve(n): return n",
    "nothing": "",
    "no Python": "I would first look at the examples, and then write solve(n).",
    "another name": "def answer(n): return n",
    "no function": "solve = 7",
    "a guess": "import random\ndef solve(n): return random.randrange(10**12)",
    "a generator": "def solve(n):\n    while True: yield n",
    "all numbers": "def solve(n): return range(10**12)",
    "a function that takes anything": """
class Any:
    def __call__(self, *a, **k): return self
solve = Any()
""",
    "letters that are none": "def solve(n): return '\\ud800' * n",
    "a program of null bytes": "\0\0\0",
}
ATTACKS: Mapping[str, Mapping[str, str]] = {
    "early exit": _EARLY_EXIT,
    "forged verdict": _FORGED,
    "equality": _EQUALITY,
    "looking it up": _LOOKING,
    "processes": _PROCESSES,
    "resources": _RESOURCES,
    "network": _NETWORK,
    "files": _FILES,
    "rights": _RIGHTS,
    "signals and time": _SIGNALS,
    "weak tests": _WEAK_TESTS,
}
"""Kind -> name -> a program whose function `solve(n)` is asked for."""

HONEST: Mapping[str, str] = {
    "plain": "def solve(n):\n    return sum(int(digit) for digit in str(n))",
    "imports": """
import bisect, collections, copy, dataclasses, datetime, decimal, enum, fractions, functools, hashlib, heapq
import io, itertools, json, math, operator, os, random, re, statistics, string, sys, threading, time, typing
@functools.lru_cache(maxsize=None)
def solve(n):
    return collections.Counter({0: sum(map(int, re.findall("[0-9]", str(n))))})[0]
""",
    "imports in the function": """
def solve(n):
    import functools, unittest.mock
    return functools.reduce(lambda a, b: a + b, map(int, str(n)))
""",
    "recursion": """
import sys
sys.setrecursionlimit(100000)
def depth(k): return 0 if k == 0 else 1 + depth(k - 1)
def solve(n):
    assert depth(20000) == 20000
    return n if n < 10 else n % 10 + solve(n // 10)
""",
    "prints": """
import sys
def solve(n):
    print('n is', n)
    print('look', file=sys.stderr)
    return sum(map(int, str(n)))
""",
    "a class": """
from dataclasses import dataclass
@dataclass
class Digits:
    n: int
    def total(self): return sum(map(int, str(self.n)))
def solve(n): return Digits(n).total()
""",
    "a program's end": """
def solve(n): return sum(map(int, str(n)))
if __name__ == '__main__':
    print(solve(int(input())))
""",
    "exceptions of its own": """
def solve(n):
    try:
        raise ValueError(n)
    except ValueError as error:
        return sum(map(int, str(error)))
""",
    "a generator inside": """
def digits(n):
    while n:
        n, d = divmod(n, 10)
        yield d
def solve(n): return sum(digits(n))
""",
    "a little memory": "def solve(n):\n    table = [0] * 10_000_000\n    return sum(map(int, str(n)))",
}
"""The sum of n's digits."""

HONEST_STDIN: Mapping[str, str] = {
    "a class": """
from dataclasses import dataclass
@dataclass
class Pair:
    a: int
    b: "int"
print(sum(vars(Pair(*map(int, input().split()))).values()))
""",
    "input": "a, b = map(int, input().split())\nprint(a + b)",
    "sys.stdin": "import sys\nprint(sum(int(word) for line in sys.stdin for word in line.split()))",
    "a buffer": "import sys\nsys.stdout.write(str(sum(map(int, sys.stdin.buffer.read().split()))) + '\\n')",
    "open(0)": "print(sum(map(int, open(0).read().split())))",
    "os.read": "import os\nprint(sum(map(int, os.read(0, 100).split())))",
    "an early end": "import sys\na, b = map(int, input().split())\nprint(a + b, end='')\nsys.exit()",
    "exit and a buffer": """
import sys
sys.stdout.buffer.write(b'%d\\n' % sum(map(int, sys.stdin.read().split())))
exit(0)
""",
    "main": "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
}
"""Prints the sum of two numbers."""
