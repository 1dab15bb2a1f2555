"""The English that takes words out of what a text asserts: denial, doubt, supposition, plans, retraction.

Each operator has a sign, a scope and phrases, one a line; `{name}` stands for a list of `_WORDS`. Its example
is a sentence that does not tell "Friday", and a test reads each of them. `statements.py` applies them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Sign = Literal["denied", "doubted", "supposed", "planned", "past"]
Scope = Literal["next words", "rest of clause", "clause", "rest of sentence", "sentence", "condition"]
"""From the operator on, or around it. A sentence ends at an adversative; a condition has its main clause."""

_WORDS = {
    "not": "not|n't|never|cannot|hardly|barely",
    "say": "say|says|said|saying|think|thinks|thought|believes?|believed|claims?|claimed|expects?|promised?"
    "|promises|guarantees?|confirm|confirms|swear|sure|certain|know|knows|told|count on|rely on",
    "why": "why|how|what|who|where|about|which",
    "happen": "be|have|come|return|arrive|reach|take|well|also|still|not|or",
    "subject": r"we|you|i|it|they|he|she|nobody|anyone|anybody|someone|the \w+|your \w+|our \w+|there|that",
    "change": "moved|changed|postponed|rescheduled|delayed|shifted|pushed|switched|updated|corrected|went",
    "colleague": r"colleagues?|managers?|team|supervisor|boss|records?|screen|system|computer|notes|list",
    "false": "unlikely|false|untrue|a lie|lies|myth|impossible|incorrect|nonsense|wrong|too good to be true",
    "sure": "certain|sure|clear|true|likely|confirmed|guaranteed|proven|given|the case|settled",
    "crowd": "(?:one|some|none) of (?:our|the|my|your) [a-z]+|some|others|many|most|people|they|folks|a few"
    "|somebody|someone",
    "forbid": "(?:do(?:es)?|must|should|may|will|can)(?:n't| not)|never|can(?:no|')t|won't|not|no",
    "more": "(?:more|less|hotter|longer|higher|lower|sooner|earlier|later)",
    "advise": "say|suggest|recommend|advise|go with|choose|pick|order",
    "it": "that|this|it|which|all(?: of (?:that|this|it))?|everything|none of (?:that|this|it)",
    "lie": "lies?|wrong|false|untrue|true|jokes?|made(?:-| )up|invented|invention|fiction|guess(?:work)?"
    "|nonsense|incorrect|mistaken|mistake|error|test|bogus|fake|fib|prank|bluff|right|so|case|typo|rubbish",
    "words": r"(?:what(?:ever)?|everything|all) (?:that )?(?:i|we)(?:'ve"
    r"| have)? (?:just )?\w+(?: [\w']+){0,5}?"
    r"|my (?:\w+ )?(?:answer|reply|words?|claim|statement|message)",
    "merely": "am|was|have|all|just|only|actually|of course|a|not|an|the|so|pure|completely|simply|totally",
    "word": "(?:me|that|it|this|a word|any|my|what|on)",
    "pronoun": "it|that|this|they|you|we|i",
    "isnt": "(?:is|will|does|do|did|was|are|has|have|wo)(?:n't| ?not)(?: really| actually| true| so)?",
    "undone": "ditched|dumped|binned|omitted|left out|disproved|disproven|debunked|axed|swapped|overtaken"
    "|dropped|scrapped|cancell?ed|rejected|refused|declined|denied|ruled out|turned down|withdrawn|revoked"
    "|abolished|abandoned|discontinued|excluded|called off|voided|void|suspended|blocked|forbidden"
    "|prohibited|outlawed|dismissed|struck|overturned|overruled|reversed|retracted|vetoed|expired|lapsed"
    "|fallen through|failed|deleted|removed|annulled|rescinded|shelved|stopped|disallowed|banned"
    "|written off|thrown out|crossed out|undone|taken (?:away|back|by)|given (?:up|away|to (?:some|any"
    "|an)\\w*)|sold out|gone|closed|off|over|full|(?:fully |all )?booked (?:up|out|solid)|fully booked"
    "|superseded|out of stock",
    "untrue": r"un\w+able|un(?:certain|clear|confirmed|verified|founded)|im(?:probable|plausible)"
    r"|in(?:valid|accurate"
    "|applicable)|outdated|obsolete|stale|moot|fake|fictional|imaginary|hypothetical|premature|optimistic"
    "|wrong|false|untrue|impossible|out of (?:the question|reach|date)|incorrect|off the (?:table|menu)"
    "|unavailable|unrealistic|too good to be true|fiction|made up|unlikely|doubtful|invented|against"
    "|no longer|history|past|wishful thinking|anyone's guess|out of fashion|in vain|out|(?:lie|joke|myth"
    "|nonsense|typo|mistake|error|slip|dream|no-go|non-starter|fantasy|mix-up|guess|rumou?r|placeholder"
    "|suggestion|wish|hope|goal|target|stretch)",
    "adverb": "(?:simply|just|only|completely|totally|quite|sadly|all|an?|the|pure|now|since|already|also"
    "|long|often|then|unfortunately|a thing of the|actually|really|definitely|certainly|meanwhile|alas"
    "|[a-z]+ly)",
    "noun": "(?:date|day|amount|number|answer|message|information|figure|offer|price|sum|reply|statement"
    "|claim|promise|time|appointment|slot|line|deal|one|value|app|website|site|page|list|board)",
    "file": "(?:order|customer|account|file|calendar|page|record|row|screen|chat|person|case|ticket"
    "|conversation|parcel|booking|list|sheet|line|message|entry|name|number|one)",
    "else": "(?:(?:some|any)(?:body|one) else(?:'s)?|another|a different|the (?:wrong|other|next|last)"
    "|other)",
    "honest": r"\W*$|\W+(?:to be honest|to tell the truth|i'm afraid|i am afraid|sorry|honestly|of course)",
}


def _pattern(phrases: str, *, before: str = r"\b", after: str = r"(?!\w)") -> re.Pattern[str]:
    """One pattern of the phrases, a phrase a line; a line that starts with `+` continues the last one."""
    lines = [line.strip() for line in re.sub(r"\n\s*\+", "", phrases.strip()).splitlines()]
    named = re.compile(r"\{([a-z]+)\}")
    filled = [named.sub(lambda match: f"(?:{_WORDS[match[1]]})", line) for line in lines]
    return re.compile(f"{before}(?:{'|'.join(filled)}){after}")


@dataclass(frozen=True, slots=True)
class Operator:
    """A phrase and what it does to the words in its scope."""

    sign: Sign
    scope: Scope
    pattern: re.Pattern[str]
    example: str


OPERATORS = (
    Operator(
        "denied",
        "rest of sentence",
        _pattern(r"""
            (?:nobody|no one|none of \w+|few(?: people)?|hardly anyone
                +|who) (?:[\w']+ ){0,2}?{say}\b(?! {why}\b)
            (?:do|does|did|would|could|can|will|am|is|are|was|must)(?:n't
                +| not) (?:[\w']+ ){0,2}?{say}\b(?! {why}\b)
            (?:cannot|'m not|never) (?:[\w']+ )?{say}\b(?! {why}\b)
            (?:anything but|far from|less than|by no means|{not}) (?:\w+ )?{sure}\b(?! {why}\b)
            {false}(?: \w+)? (?:that|to \w+)|(?:error|mistake|misconception|illusion|fallacy) to \w+
            (?:doubts?|denied that|deny that|disbelieve)
            no (?:idea|clue|chance|telling|guarantee|promise|evidence|sign|truth|hope|indication
                +|proof)\b(?! {why}\b)
            no way
            the (?:idea|claim|notion|rumou?r|story|belief|theory|myth|lie|legend|thought) that
        """),
        "Nobody believes that, after all, it comes Friday.",
    ),
    Operator(
        "denied",
        "next words",
        _pattern(r"""
            (?:any|every|all|each)(?:thing|one|body|where)?(?: [\w']+){0,2}? (?:but|except|save)
            except(?: for)?|excluding|apart from|other than|rather than|instead of|as opposed to
            unlike|contrary to|in place of|and not
        """),
        "It comes any day but Friday.",
    ),
    Operator(
        "denied",
        "rest of clause",
        _pattern(r"""
            (?:sooner|rather) (?:[\w']+ ){0,6}?than
            too \w+ to
            fails? to|failed to|refuse[sd]?|deny|denies|withh[eo]ld|declined? to|rul(?:es?|ed) out
                +|(?:ha[sd]|have) yet to
            (?<!the )(?<!your )(?:drop(?:ped)?|scrap(?:ped)?|turn(?:ed)? down|call(?:ed)? off
                +|g[ia]ven? up(?: on)?|abandon(?:ed)?|reject(?:ed)?|exclude[sd]?|withdr[ae]wn?|skip(?:ped)?
                +|veto(?:ed)?|discontinued?|abolish(?:ed)?|revoked?|ceased?|quit|stop(?:ped|s)?(?! (?:by
                +|at)\b)|ban(?:ned|s)?|forbid\w*|prohibit\w*|(?<!you can )(?<!you may )cancel(?:l?ed
                +|s)?(?! (?:the|your|this|that|my
                +|an?) order)|miss(?:es|ed)|lack(?:s|ed)?|prevent\w*)\b
            (?:(?:ran|run|are|is|'re|sold) out|no trace|free|devoid) of(?! charge| cost)|do(?:ing)? without
            (?:decided?|advised?|warn\w*|speaks?|spoke) against|d(?:one?|id) away with|refrain\w* from
                +|say goodbye to|forget about|(?:closed|shut|on holiday) on|(?:keep|stay
                +|steer|stand) (?:away|clear|off|out)\b
            not|never|no|cannot|without|unable|neither|nor|hardly|barely|nobody|none|nothing|impossible
        """),
        "It will not come on Friday.",
    ),
    Operator("denied", "rest of clause", re.compile(r"n't\b"), "It won't come on Friday."),
    Operator(
        "doubted",
        "sentence",
        _pattern(r"""
            maybe|perhaps|possibly|conceivably|supposedly|allegedly|purportedly|theoretically|ideally
                +|presumably
            (?:a|any|some|every|the) (?:\w+ )?(?:chance|possibility|likelihood|probability)\b(?! to\b)
            conceivable|imaginable|thinkable|(?:possible|plausible|not impossible
                +|not out of the question)(?: that| it)
            who knows|who can (?:tell|say)|anyone's guess|(?:i|we|i'd|my|a|wild|would) guess|guessing
                +|guesses|hunch
            bets?|wager|could go either way|or (?:so they say|not|whatever|something|whenever|maybe)
            (?:not sure|unsure|uncertain|not certain|unclear|(?:hard|impossible) to (?:say|tell
                +|know))\b(?! {why}\b)
            (?:for example|for instance|e\.g)|(?:some|any|whichever|whatever) (?:day|date|one
                +|number) (?:like|such as)
        """),
        "Perhaps it comes on Friday, I am told.",
    ),
    Operator(
        "doubted",
        "sentence",
        _pattern(r"""
            (?:hope|goal|target|aim|ambition|wish|dream|idea|proposal|suggestion
                +|assumption)(?: [\w']+){0,4}? (?:is|was|would be)
            (?:let's|let us) (?:call|settle|agree)|call it
            horoscope|fortune.?teller|crystal ball|tarot|tea leaves|flip(?:ped)? a coin|coin says|dice
                +|psychic
            rumou?rs?|rumou?red|gossip|hearsay|legend has it|word on the street|a little bird
            {crowd}(?: people| customers| of them| (?:in|on|at|from) [^.,;]{1,25}?)? (?:(?:say|claim
                +|think|believe
                +|swear|mention|post)s?|said|claimed|mentioned|posted|wrote)
            (?:says|said|claims|thinks|believes|according to) (?:the (?:man|woman|guy|lady|boy|girl
                +|internet|web|forum|radio|paper|neighbou?r)|an? \w+|some\w* \w+|my (?!{colleague})\w+)
            (?:some|others|many|most|a few)(?: people| customers| of them)? gets?
            (?:for|to) (?:some|others|most|many|a few)\b(?! (?:reason|time|of)\b)
            (?:choose|free|welcome|like|want|prefer) to (?:believe|think)
            you (?:may|can|could) (?:believe|think)
            (?:my (?!{colleague})\w+|an? \w+|some \w+) (?:think|say|believe|claim|swear|reckon|feel|dream
                +|told me)\w*
            \w+ (?:thinks|reckons|suspects|guesses|fancies|dreams)
        """),
        "My uncle says that it comes on Friday.",
    ),
    Operator(
        "doubted",
        "sentence",
        _pattern(r"""
            pigs? (?:can |will )?fl(?:y|ies)|hell freezes|blue moon|leap year
            in (?:theory|my dreams|your dreams|an? \w+ world|another (?:life|world|universe))|hypothetically
            (?:let's|let us) (?:say|pretend|imagine|assume|suppose)
            pretend|imagine|suppose|supposing|assuming|assume|picture|dream|dreamt|dreamed|fantasy
            wish|wished|hopefully|hope|hopes|hoping|if i had to|with (?:\w+ ){0,4}?luck|fingers crossed
                +|knock on wood
            \w+ permitting|god willing|(?:in the )?best case|at best|miracle
        """),
        "Let us pretend that it comes on Friday.",
    ),
    Operator(
        "doubted",
        "clause",
        _pattern(r"""
            probably|likely|presumably|apparently|reportedly|seemingly|in all likelihood|awaiting
            (?:he|she|they|we|i|colleagues?|manager|driver|team|boss|shop) may (?!i\b|add\b|\d)\w+
            by (?:mistake|accident)|in error|mistakenly|wrongly|erroneously
            might|could (?!you\b|i\b|be (?:happier|more))\w+|could've|may {happen}
        """),
        "It might come on Friday.",
    ),
    Operator(
        "supposed",
        "clause",
        _pattern(r"""
            would(?:n't|'ve)?|(?:i|you|he|she|it|we|they)'d
        """),
        "In that case Friday would suit us.",
    ),
    Operator(
        "supposed",
        "rest of sentence",
        _pattern(r"""
            whether|to see if|(?:check|ask|find out|wonder|wondering|know|tell me|sure|see|asked|asking) if
            pretend\w*|as if|as though
        """),
        "We will check whether it comes on Friday.",
    ),
    Operator(
        "supposed",
        "condition",
        _pattern(r"""
            on (?:the )?(?:assumption|premise|understanding|proviso)
            providing|so long as|in the event|on the off chance|only when|granted that
            if|unless|provided(?: that)?|in case|as long as|lest|on condition
            (?<![\w'] )(?:had|were) {subject}(?! been (?:late|slow))
            (?<![\w,'%] )(?:had|were) \w+
            (?<![\w,'] )should {subject}
        """),
        "It comes on Friday if we send it.",
    ),
    Operator(
        "doubted",
        "sentence",
        _pattern(r"""
            (?:depends?|hinges?|hangs) on|subject to|conditional on|contingent on|pending (?:approval
                +|review|confirmation|an?\b|the|your)|up for (?:discussion|debate)|under (?:review
                +|discussion|consideration)
            (?:remains|yet) to be (?:seen|decided|confirmed)|to be (?:decided|confirmed|announced)
                +|open question
            an? (?:\w+ )?(?:example|illustration|sample)|as an example
        """),
        "Friday depends on the weather.",
    ),
    Operator(
        "doubted",
        "rest of clause",
        _pattern(r"""
            (?:we|i|they|team|driver)(?:'ll| will| can| shall|'re| are|'m| am)?(?: always| still)? (?:try
                +|tries|trying|aim|aiming|strive|striving|intend|want|work|working|look|looking|fight
                +|fighting|push|pushing|consider|considering|debating|think|thinking) (?:to|for|at|on|of
                +|about|into|towards)\b(?! (?:you|it)\b)
            (?:request|claim|application|demand|plea|bid|call|proposal|suggestion|talk|question|chance|hope
                +|dream) (?:for|of|about)
            (?:consider|argu|propos|discuss|debat|request)(?:e[sd]?|ing|ed|s)?(?! (?:that|you)\b)
            (?:apply|ask|beg|bid|plead|pray|fight|sue|wait|queue) for|(?:welcome|free|able
                +|invited) to (?:ask|claim|request|try)
        """),
        "We aim for Friday.",
    ),
    Operator(
        "supposed",
        "clause",
        _pattern(r"""
            usually|normally|typically|generally|ordinarily|commonly|mostly|often|sometimes|occasionally
                +|rarely|seldom
            (?<![\w'] )you(?:'ve|'d| have| had)? (?:just |also )?(?:said|wrote|ask|asked|wanted|thought
                +|hoped|requested|wished|mentioned|claimed|demanded|typed|entered|heard|read)
            what (?:you|we|everyone|everybody|people) (?:would |might |may )?(?:like|love|want|wish|hope
                +|need|expect)s?(?: to (?:hear|see|get))?
            on average|average|as a rule|in general|in most cases|most of the time|more often than not
                +|tends? to
            in (?:[\w%]+ ){1,5}cases|(?:at|with|for|by|to|in) (?:most|many) [a-z]+s\b
        """),
        "Parcels usually come on Friday.",
    ),
    Operator(
        "planned",
        "clause",
        _pattern(r"""
            in (?:19|20)\d\d (?:[\w']+ ){0,4}?(?:cost|was|were)|from next (?:week|month|year)
            in (?:the (?:old|good old) days|the past|those days)|back then|(?:years|ages|decades) ago
                +|once upon a time|formerly|previously
            (?:until|till|up to) (?:last|recently|yesterday|this)
            last (?:week|month|year|season|spring|summer|autumn|winter) (?:\w+ ){0,4}?(?:cost|(?:got|paid
                +|was|were)(?= [$€£\d]))
            (?:cost|was|were) [$€£\d][\w.,%]*(?: [\w']+)? (?:before|until|till|when|back)
            (?:cost|(?:was|were)(?= [$€£\d])) (?:[\w$]+ ){0,4}?last (?:week|month|year|season|spring|summer
                +|autumn|winter)
        """),
        "In the old days it came on Friday.",
    ),
    Operator(
        "planned",
        "rest of clause",
        _pattern(r"""
            (?:was|were|'d been|had been) (?:\w+ )?(?:supposed|due|meant|planned|scheduled|promised
                +|expected|going)|(?:was|were) to (?!be)\w+|had been \w+ (?:for|on|at|in|to)
            (?:wanted|meant|intended|planned|hoped|tried) to|(?:was|were) (?:intended|thought)|should(?:'ve
                +| have)(?! (?:it|them|your|the|this|that)\b)|used to|no longer|about to
        """),
        "It was due on Friday.",
    ),
    Operator(
        "past",
        "next words",
        _pattern(r"""
            {change}(?: [\w']+){0,4} from
        """),
        "It was postponed from Friday to Monday.",
    ),
)

IDIOMS = _pattern(r"""
    (?:full|closed|booked|taken|gone|nothing|nobody)\b[^.;:!?]{0,30}? except(?: for)?
    (?:with|without|there is|there's)? ?(?:no|without|beyond) (?:a |any )?(?:doubts?|fail|delay|problems?)
    (?:there is |there's )?no (?:worries|trouble|question|exception|matter|need|rush|hurry)
    without (?:trouble|further ado)|(?:no|without) (?:any )?(?:extra |additional )?(?:charges?|fees?|costs?)
    no(?:t)? (?:later|earlier|sooner|longer|more|less|fewer) than
    {forbid} (?:\w+ ){0,4}?(?:above|over|exceed|beyond|past|below|under|before|until|till|{more} than)
    \w+n't (?:\w+ ){0,4}?(?:above|over|exceed|beyond|past|below|under|before|until|till|{more} than)
    \w+n't (?:do|offer|find|give you|make it) (?:\w+ )?(?:better|other|earlier|sooner|more) than
    not (?:only|just|merely|to worry|bad|at all)|not (?:be |going to be )?(?:a |any )?problem
    nothing (?:but|less than|to (?:worry|pay|do))|need not|why not|even (?:if|though)|if not
    do(?:n't| not) (?:you )?(?:worry|hesitate|mind|need|have to)
    can(?:no|')t wait|(?:i|we) can(?:no|')t (?:thank|apologi[sz]e|tell you how)
    (?:i|we)(?:'d| would) (?:like|love) to (?:tell|let|confirm|inform|say|see|help|thank|offer|apologi[sz]e
        +|assure|invite|add|point|remind|share|know|hear|welcome)|(?:i|we)(?:'d| would) (?:be (?:happy|glad
        +|pleased|delighted)|{advise})
    (?:perhaps|maybe|possibly|probably|likely) (?:\w+ )?(?:earlier|sooner|less|faster|quicker|before)
    would you|(?:that|this|it|which|total|date|time|amount) would be|(?<!what )you(?:'d| would) like
    hope (?:this|that|it|you|to)|glad you asked|you bet|best guess
""")
"""Say nothing about what they stand beside: "no problem, it comes Friday", "no doubt it is Friday"."""

POLITE_CONDITION = _pattern(
    r"""
    if i (?:see|read) (?:it|this|that)|if (?:that|this|it|there|anything|possible|necessary|needed|so|i may
        +|only|any|you're)
    unless you\b
    if you(?:'d| would| ever)? (?:have|need|want|wish|like|prefer|care|don't|do|are|still|would|notice
        +|require|look)
    """,
)
"""Conditions that hold nothing back: "it comes Friday, if you want to know"."""

ADVERSATIVE = re.compile(r"\b(?:but|however|instead|nevertheless|still|actually|yet)\b|;")
"""Ends the scope of a doubt or denial: "I was not sure, but it is Friday"."""

DENIED_AFTER = _pattern(
    r"""
    (?:is|are|was|were|be|will be)(?:n't| not| never| no longer| hardly)\b(?! (?:far|bad|much|long|all|yet)\b)
    (?:is|are|was|were|be)(?: {adverb}){0,2} (?:no(?! (?:secret|surprise|joke|mistake|lie|error|typo|small
        +|mean)\b)|nothing(?: we| you| i| that)|nowhere|none of|neither)
    (?:(?:wo|ca|do|does)n't|(?:will|can|does|do) ?not|cannot) (?:work|happen|do|be|apply|suit|hold
        +|come true|go|exist)
    (?:is|are|was|were|be|been|has been|have been|had to be|sounds|looks|seems|remains|stays|got|gets|has
        +|have)(?: {adverb}){0,3} (?:been )?(?:{undone}|{untrue})
    (?:belong|appl|refer)\w* to(?! you)|used to be|was once|(?:no longer|never) \w+
    went out of \w+|stopped \w+ing|ceased to|is what \w+ (?:used to|once|had)
    (?:has been|have been|is|was)(?: only| just)? (?:suggested|proposed|discussed|considered|requested
        +|mentioned)
    fell (?:through|flat|apart)|came to nothing|expired|ended|lapsed|collapsed|ran out|vanished
        +|went up in smoke
    """,
    before=r"(?:,? (?:and|or|nor) (?:on )?[\w$]+)?,?(?: (?!(?:that|which|who|we|you|i|they|it|and|but|so|as"
    r"|because|since|after|when|once|if|while|where)\b)[\w$#-]+){0,4}? ",
)
"""Words behind a fact that deny it: "Friday is out of the question"."""

RETRACTIONS = _pattern(
    r"""
    \b(?:{it}|{words})(?: \w+)? ?(?:is|was|were|'s|isn't|wasn't)(?: {merely}){0,4} {lie}
    \b{words} (?:(?:is|was|has been)(?: {adverb}){0,3} (?:{undone}|{untrue})|(?:no longer|not) (?:hold
        +|appl|count|stand)\w*)
    \b(?:overr(?:ul|id)|correct|contradict|stop)(?:es|ed|s|den)? (?:me|us)\b
    \b(?:i|we)(?:'m|'ve)?(?: {merely}){0,4} (?:lied|lying|joking|kidding|fibbed|bluffing|guessed|guessing)
    \b(?:i|we)(?:'ve| have)? (?:just |must have )?made (?:a|an) (?:mistake|error|slip|typo)(?: (?:there
        +|here|with that))?\W*$
    \b(?:that|it)(?: is|'s) what (?:i|we) (?:tell|say|told|said)(?: \w+)?\W*$
    \b(?:i|we)(?:'m|'ve)?(?: {merely}){0,4} (?:not serious|pulling your leg|misread|misspoke|wrong)
    \b(?:i|we)(?:'ve)?(?: {merely}){0,3} (?:made|got|had) (?:all )?(?:that|it|this) (?:all )?(?:up|wrong)
    \b(?:i|we)(?:'ve| have)? (?:just )?(?:mixed|confused|muddled|mistook)\b
    ^\W*(?:oh\W+)?(?:wait|hold on|hang on)\W+(?:that|this|it|no)\b
    \b(?:i|we) (?:just )?invented (?:that|it|this|all)
    \b(?:i|we) (?:have to )?take (?:that|it|this|everything) back
    \b(?:i|we) (?:have no (?:idea|clue)|haven't (?:a|any) (?:clue|idea))\b(?! (?:{why}|that)\b)
    \b(?:i|we) don't (?:actually |really )?know\b(?! (?:{why}|that)\b)
    \b(?:just|only) (?:kidding|joking|guessing|a guess)
    ^\W*(?:kidding|joking|not|psych|nope|or (?:maybe )?not|as if|yeah right|no idea|who knows)\W*$
    ^\W*(?:wishful thinking|fat chance|in your dreams)
    ^\W*(?:(?:all|pure|just|only|utter|a) ){0,2}(?:lies?|nonsense|fiction|rubbish|jokes?|invented|untrue)
    ^\W*(?:not (?:really|quite|so|true|exactly)|nope|wrong|false|hardly)\W*[,.!]
    \b(?:can|may|might|could) be (?:wrong|mistaken|off)\b|\b(?:here|but|though) there (?:is|are) (?:none
        +|nothing)\b
    ^\W*(?:here )?there (?:is|are) (?:none|nothing)\b
    \b(?:scratch|strike|forget|ignore|disregard|delete|skip|never mind) (?:that|it|this|everything
        +|what (?:i|we)|all|my|the (?:above|last|previous|first))
    \b(?:that|this|the|my|our|which)(?: (?:last|previous|first|above|said|same))?(?: {noun})? (?:is|was|has
        +|have|had|got)(?: {adverb}){0,3} (?:been )?(?:{undone}|{untrue})
    \b(?:looking|looked|read|reading|meant|intended|thinking|mixed|confused|belongs?|was|is|had|have|opened
        +|took)\b(?: [\w']+){0,4}? {else}(?: {file})?\W*$
    \b(?:that|this|the|which)(?: {noun})? (?:belong|appl|refer|relat)\w* (?:only )?to(?! you)
    \byours is (?:elsewhere|another|next|not|the other|a different)
    (?<!if it )(?<!if they )(?<!if that )\b(?:is|are|was|were|do|does|did|will|can|has|have)(?: not|n't)\W*$
    \bi(?:'m| am) not (?:\w+ )?sure(?: at all| about (?:that|it|this))?\W*$
    \bbut (?:it|that|this) (?:can|could|will|did|does)(?:n't|not| not) (?:be (?:done|kept|met|so)|work|hold)
    \bbut (?:the \w+|that|this|it) (?:is|was|are|were) (?:wrong|false|mistaken|untrue|incorrect)
    \b(?:i|we) (?:should(?:n't| not) have|ought not to have) \w+|(?:i|we) (?:spoke too soon|stand corrected
        +|was mistaken)
    ^\W*(?:(?:oh|oops|sorry|wait|hm+|no)\W+){0,2}(?:correction|my (?:mistake|bad|error)|wrong (?:{file}))\b
    \b(?:do not|don't|never|better not|shouldn't) (?:believe|trust|rely on|count on|quote|take) {word}
    \b(?:april fool|fooled you|gotcha|on second thoughts?|don't hold me to|take it with a grain)
    ^(?:[\w' ]{1,30},\s)?\W*(?:(?:well|actually|no|sorry|but|oh)\W+){0,3}{pronoun} (?:really )?{isnt}{honest}
    """,
    before="",
)
"""Sentences that take back what was said before them: "That was a lie.", "Just kidding."."""
